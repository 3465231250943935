"""Query positions, windows, caps, sinks, 8-bit keys and values, pools and status words, against numpy."""

import unittest

import numpy as np

import vanward
from tests.support import cpu_session, floats, ints
from vanward import AttentionState, BlockList, Index, PagedKV, SelectStatus

SEED = 20260708


def e4m3fn(codes):
    """Values of float8_e4m3fn by its definition: bias 7, three bits of mantissa, subnormals, no infinities."""
    codes = codes.astype(np.int64)
    sign, exponent, mantissa = 1 - 2 * (codes >> 7), codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


class Options(unittest.TestCase):
    def setUp(self):
        self.session = cpu_session()
        self.addCleanup(self.session.close)
        self.random = np.random.default_rng(SEED)

    def normal(self, *shape):
        return self.random.standard_normal(shape, np.float32)

    def attended(self, q, k, v, begin, end, *, soft_cap=0.0, sink=-np.inf):
        """One row over the tokens begin … end−1, in double precision."""
        scores = k[begin:end].astype(np.float64) @ q / np.sqrt(q.size)
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores)
        return weights @ v[begin:end].astype(np.float64) / (weights.sum() + np.exp(sink))

    def test_rows_of_a_sequence_see_what_stands_before_them(self):
        tokens, rows, dim, value_dim = 37, 4, 32, 16
        k, v, q = self.normal(2, tokens, 1, dim), self.normal(2, tokens, 1, value_dim), self.normal(2, rows, 3, dim)
        sinks, out = self.normal(3), floats(2, rows, 3, value_dim)
        seq_lens, q_lens = np.array([tokens, 20], np.int32), np.array([rows, 2], np.int32)
        self.session.attention(
            kv=PagedKV(k, v, seq_lens),
            q=q,
            q_lens=q_lens,
            scale=1 / np.sqrt(dim),
            soft_cap=1.5,
            window=9,
            sinks=sinks,
            out=out,
        )
        for i in range(2):
            for row in range(q_lens[i]):
                end = seq_lens[i] - q_lens[i] + row + 1
                for h in range(3):
                    want = self.attended(
                        q[i, row, h], k[i, :, 0], v[i, :, 0], max(end - 9, 0), end, soft_cap=1.5, sink=sinks[h]
                    )
                    np.testing.assert_allclose(out[i, row, h], want, atol=2e-6)  # a few float32 roundings of 1
        self.assertFalse(out[1, 2:].any())

    def test_8_bit_keys_and_values_are_scaled(self):
        tokens, dim = 24, 16
        k, v = (self.random.integers(0, 0x50, (1, tokens, 2, dim), np.uint8) for _ in "kv")  # up to 8, no NaN
        k_scale, v_scale = np.array([0.25, 0.5], np.float32), np.abs(self.normal(1, tokens, 2))
        q, out = self.normal(1, 2, dim), floats(1, 2, dim)
        kv = PagedKV(
            vanward.float8_e4m3fn(k),
            vanward.float8_e4m3fn(v),
            np.array([tokens], np.int32),
            k_scale=k_scale,
            v_scale=v_scale,
        )
        self.session.attention(kv=kv, q=q, out=out)
        wide_k, wide_v = e4m3fn(k) * k_scale[:, None], e4m3fn(v) * v_scale[..., None]
        for h in range(2):
            want = self.attended(q[0, h], wide_k[0, :, h], wide_v[0, :, h], 0, tokens)
            np.testing.assert_allclose(out[0, h], want, rtol=1e-4, atol=1e-5)  # sums of 16 products of size 10

        index = Index("minmax", block_size=8, key_max=floats(1, 3, 2, dim), key_min=floats(1, 3, 2, dim))
        self.session.index_update(index=index, k=kv.k, k_scale=k_scale, seq_lens=kv.seq_lens)
        blocks = wide_k[0].reshape(3, 8, 2, dim)
        np.testing.assert_array_equal(index.key_max[0], blocks.max(1))
        np.testing.assert_array_equal(index.key_min[0], blocks.min(1))

    def test_a_pool_is_read_by_slots(self):
        pages, page, dim = 7, 8, 16
        k, v = self.normal(pages, page, 1, dim), self.normal(pages, page, 1, dim)
        q, out = self.normal(1, 2, dim), floats(1, 2, dim)
        ids = np.array([[[0, 3, 5], [1, 2, 9]]], np.int32)
        slots = np.array([[[4, -1, 2], [6, 0, 0]]], np.int32)
        counts = np.array([[3, 2]], np.int32)
        kv = PagedKV(k, v, np.array([44], np.int32))
        self.session.attention(kv=kv, q=q, block_size=page, list=BlockList(ids, counts, slots), out=out)
        # Block 5 holds tokens 40 … 47, of which the sequence has four; block 3 is not there.
        held = [np.r_[4 * page : 5 * page, 2 * page : 2 * page + 4], np.r_[6 * page : 7 * page, 0:page]]
        for h, rows in enumerate(held):
            flat_k, flat_v = k.reshape(-1, dim)[rows], v.reshape(-1, dim)[rows]
            want = self.attended(q[0, h], flat_k, flat_v, 0, len(rows))
            np.testing.assert_allclose(out[0, h], want, atol=2e-6)  # a few float32 roundings of 1

    def test_the_caches_of_engines_are_views(self):
        """The layouts in docs/engine.md, each filled with the same sequence."""
        blocks, page, heads, dim, tokens = 6, 16, 2, 16, 70
        pages = np.array([[4, 1, 5, 0, 2]], np.int32)
        plain = self.normal(2, 5, page, heads, dim)  # keys and values of the pages in order
        q, lens = self.normal(1, 4, dim), np.array([tokens], np.int32)
        flash, nhd = floats(2, blocks, page, heads, dim), floats(blocks, 2, page, heads, dim)
        hnd, unified = floats(blocks, 2, heads, page, dim), floats(2, 5 * page + 8, heads * dim)
        cells = self.random.permutation(5 * page).astype(np.int32)[None] + 8
        flash[:, pages[0]], nhd[pages[0]] = plain, plain.swapaxes(0, 1)
        hnd[pages[0]] = plain.swapaxes(0, 1).swapaxes(2, 3)
        unified[:, cells[0]] = plain.reshape(2, 5 * page, heads * dim)
        split = unified.reshape(2, -1, 1, heads, dim)
        whole = plain.reshape(2, 1, 5 * page, heads, dim)
        views = dict(
            flash=PagedKV(flash[0], flash[1], lens, pages),
            nhd=PagedKV(nhd[:, 0], nhd[:, 1], lens, pages),
            hnd=PagedKV(hnd[:, 0].swapaxes(1, 2), hnd[:, 1].swapaxes(1, 2), lens, pages),
            unified=PagedKV(split[0], split[1], lens, cells),
            stream=PagedKV(whole[0], whole[1], lens),
        )
        ids = BlockList(np.array([[[0, 2, 4], [1, 3, 4]]], np.int32), np.full((1, 2), 3, np.int32))
        for name, kv in views.items():
            out = floats(1, 4, dim)
            self.session.attention(kv=kv, q=q, list=ids, block_size=page, out=out)
            for h in range(4):
                rows = np.concatenate([np.arange(b * page, min((b + 1) * page, tokens)) for b in ids.ids[0, h // 2]])
                k, v = (x[0, rows, h // 2] for x in whole)
                want = self.attended(q[0, h], k, v, 0, len(rows))
                np.testing.assert_allclose(out[0, h], want, atol=2e-6, err_msg=name)  # a few float32 roundings of 1
            index = Index.minmax(kv.k, batch=1, tokens=80, block_size=page)
            self.session.index_update(index=index, k=kv.k, page_table=kv.page_table, seq_lens=lens)
            np.testing.assert_array_equal(index.key_max[0, 1], whole[0, 0, page : 2 * page].max(0), name)

    def test_a_merged_state_meets_its_sinks_once(self):
        acc, m, l = self.normal(1, 2, 16), floats(1, 2), floats(1, 2) + 3
        state = AttentionState(acc, m, l)
        out, sinks = floats(1, 2, 16), np.array([0.5, -np.inf], np.float32)
        self.session.merge_states(inputs=[state, state], sinks=sinks, out=out)
        want = 2 * acc / (6 + np.exp(sinks))[:, None]
        np.testing.assert_allclose(out, want, rtol=1e-6)

    def test_selection_of_each_row_says_what_it_met(self):
        tokens, rows, dim, size = 32, 2, 16, 8
        k, q = self.normal(1, tokens, 1, dim), self.normal(1, rows, 1, dim)
        seq_lens = np.array([tokens], np.int32)
        index = Index("minmax", block_size=size, key_max=floats(1, 4, 1, dim), key_min=floats(1, 4, 1, dim))
        self.session.index_update(index=index, k=k, seq_lens=seq_lens)
        selected = BlockList(ints(1, rows, 1, 2), ints(1, rows, 1))
        status = np.full((1, rows, 1), 99, np.uint32)
        q[0, 1, 0, 3] = np.nan
        select = dict(method="minmax", block_size=size, k=2, index=index, q=q, seq_lens=seq_lens, status=status)
        self.session.select_blocks(**select, selected=selected)
        blocks = k[0, :, 0].reshape(4, size, dim).astype(np.float64)
        bounds = np.maximum(q[0, 0, 0] * blocks.max(1), q[0, 0, 0] * blocks.min(1)).sum(1)
        self.assertEqual(selected.ids[0, 0, 0].tolist(), sorted(np.argsort(-bounds)[:2]))
        self.assertEqual(selected.ids[0, 1, 0].tolist(), [0, 1])  # all rank last: the lower index wins
        self.assertEqual([SelectStatus(bits) for bits in status[0, :, 0]], [SelectStatus(0), SelectStatus.NAN])

    def test_a_forecast_with_memory_reads_the_token_before(self):
        n, inputs, heads, dim = 400, 8, 2, 16
        x, before = self.normal(n, inputs), self.normal(n, heads, dim)
        normal = np.c_[x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True)), np.ones(n)]
        of_x = (normal @ self.normal(inputs + 1, heads * dim)).reshape(n, heads, dim)
        q = (of_x + 0.5 * before).astype(np.float32)
        shape = dict(layers=1, input_dim=inputs, q_heads=heads, head_dim=dim, ridge=1e-6)
        with vanward.Forecast(self.session, **shape, memory=True) as fitted:
            self.assertTrue(fitted.info().memory)
            with self.assertRaisesRegex(vanward.InvalidArgument, "previous: "):
                fitted.accumulate(layer=0, x=x, q=q)
            fitted.accumulate(layer=0, x=x, q=q, previous=before)
            fitted.solve()
            found = floats(n, heads, dim)
            fitted.project(layer=0, x=x, previous=before, positions=ints(n), q=found)
            np.testing.assert_allclose(found, q, atol=1e-3)  # the ridge, and sums of 41 products in float32


if __name__ == "__main__":
    unittest.main()
