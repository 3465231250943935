"""Every call once, against numpy."""

import gc
import math
import tempfile
import unittest
from pathlib import Path

import numpy as np

import vanward
from tests.support import cpu_session, floats, ints
from vanward import AttentionPartials, AttentionState, BlockList, Holt, Index, IndexKind, PagedKV, PredictorState

SEED = 20260707


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class Calls(unittest.TestCase):
    def setUp(self):
        self.session = cpu_session()
        self.addCleanup(self.session.close)
        self.random = np.random.default_rng(SEED)

    def sequence(self, tokens=23, kv_heads=2, group=3, dim=16, page=4):
        """One paged sequence: random keys, values and queries, its pages shuffled."""
        pages = -(-tokens // page)
        k, v = (self.random.standard_normal((pages, page, kv_heads, dim), np.float32) for _ in "kv")
        q = self.random.standard_normal((1, kv_heads * group, dim), np.float32)
        table = self.random.permutation(pages).astype(np.int32)[None]
        flat = [x[table[0]].reshape(-1, kv_heads, dim)[:tokens].astype(np.float64) for x in (k, v)]
        return q, PagedKV(k, v, np.array([tokens], np.int32), table), flat[0], flat[1]

    def test_int4_keys_and_values(self):
        q, kv, k, v = self.sequence(tokens=83, dim=64, page=16)
        codes, scales = np.zeros((5, 16, 2, 32), np.uint8), np.zeros((5, 16, 2), np.uint8)
        kv.int4 = vanward.Int4KV(
            block_size=16,
            exact_tokens=16,
            k=codes,
            v=codes.copy(),
            k_scale=vanward.float8_e4m3fn(scales),
            v_scale=vanward.float8_e4m3fn(scales.copy()),
            page_table=np.arange(5, dtype=np.int32)[None],
            coded_lens=ints(1),
            means=np.zeros((1, 5, 2, 64), np.float16),
            weights=floats(2, 64),
        )
        sample = self.random.standard_normal((9, 6, 64), np.float32)
        self.session.kv_weights(block_size=16, q=sample, k=k.astype(np.float32), weights=kv.int4.weights)
        np.testing.assert_allclose(kv.int4.weights.mean(axis=1), 1, rtol=1e-4)
        self.session.kv_quantize(layers=[kv])
        self.assertEqual(kv.int4.coded_lens.tolist(), [80])
        self.assertGreater(np.unique(codes[1:]).size, 100)
        self.assertTrue((codes[0] == 0).all())

        # The codes stand for keys and values that are near; without codes attention is exact.
        coded, exact = floats(1, 6, 64), floats(1, 6, 64)
        self.session.attention(kv=kv, q=q, out=coded)
        kv.int4 = None
        self.session.attention(kv=kv, q=q, out=exact)
        self.assertGreater(abs(coded - exact).max(), 1e-4)
        self.assertLess(np.linalg.norm(coded - exact), 0.15 * np.linalg.norm(exact))

    def test_verify_and_pack(self):
        draft = np.array([[5, 6, 7], [1, 9, 3]])
        target = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
        accepted, next_token, committed = ints(2), np.zeros(2, np.int64), np.zeros((2, 4), np.int64)
        mismatch = np.zeros(2, bool)
        verify = dict(draft=draft, target=target, accepted=accepted, next_token=next_token)
        self.session.verify(**verify, mismatch=mismatch, committed=committed)
        self.assertEqual((accepted.tolist(), next_token.tolist()), ([3, 1], [8, 2]))
        self.assertEqual(committed.tolist(), [[5, 6, 7, 8], [1, 2, -1, -1]])
        self.assertEqual(mismatch.tolist(), [False, True])

        rows = [self.random.standard_normal((2, 3, 5)).astype(kind) for kind in (np.float16, np.float64)]
        packed, offsets = [np.zeros((6, 5), r.dtype) for r in rows], ints(3)
        self.session.pack(rows=rows, packed=packed, accepted=accepted, offsets=offsets)
        self.assertEqual(offsets.tolist(), [0, 3, 4])
        for r, p in zip(rows, packed, strict=True):
            np.testing.assert_array_equal(p[:4], np.concatenate([r[0], r[1, :1]]))
            p[:] = 0
        accepted[:] = 0
        self.session.verify_pack(**verify, rows=rows, packed=packed, offsets=offsets)
        np.testing.assert_array_equal(packed[0][:4], np.concatenate([rows[0][0], rows[0][1, :1]]))

        # A stop token ends the first request, its length the second.
        length, finish = ints(2), np.zeros(2, np.uint8)
        end = dict(stop=np.array([6]), remaining=np.array([9, 1], np.int32), committed_len=length, finish=finish)
        self.session.verify_pack(**verify, **end, rows=rows, packed=packed, offsets=offsets)
        self.assertEqual((accepted.tolist(), next_token.tolist()), ([2, 1], [-1, -1]))
        self.assertEqual((length.tolist(), offsets.tolist()), ([2, 1], [0, 2, 3]))
        self.assertEqual([vanward.Finish(f) for f in finish], [vanward.Finish.STOP, vanward.Finish.LENGTH])
        self.session.verify(**verify, **end, committed=committed)
        self.assertEqual(committed.tolist(), [[5, 6, -1, -1], [1, -1, -1, -1]])

        # Drafts of two tokens, of none and of one, one after the other.
        accepted, next_token = ints(3), np.zeros(3, np.int64)
        self.session.verify(
            draft=np.array([5, 6, 7]),
            target=np.array([5, 6, 8]),
            draft_ends=np.array([2, 2, 3], np.int32),
            bonus=np.array([20, 21, 22]),
            accepted=accepted,
            next_token=next_token,
        )
        self.assertEqual((accepted.tolist(), next_token.tolist()), ([2, 0, 0], [20, 21, 8]))

    def test_verify_sample(self):
        # A token of each row has all mass: 2, then 1, then 1.
        target = np.full((1, 3, 3), -1000, np.float32)
        target[0, [0, 1, 2], [2, 1, 1]] = 0
        next_token, accepted, committed = ints(1), ints(1), ints(1, 3)
        logprobs = floats(1, 3)
        given = dict(
            draft=np.array([[2, 0]], np.int32),
            target=target,
            seeds=np.array([7]),
            positions=np.array([0]),
            next_token=next_token,
            accepted=accepted,
            committed=committed,
            logprobs=logprobs,
        )
        self.assertEqual(self.session.verify_sample_scratch(**given), 0)
        self.session.verify_sample(**given)
        self.assertEqual((committed.tolist(), accepted.tolist(), next_token.tolist()), ([[2, 1, -1]], [1], [1]))
        np.testing.assert_array_equal(logprobs, 0)
        given["draft"][0, 1] = 1
        self.session.verify_sample(**given, rule="greedy")
        self.assertEqual((committed.tolist(), accepted.tolist()), ([[2, 1, 1]], [2]))

    def test_trees_are_prepared_verified_and_compacted(self):
        # The root has two children, and the second of them a child.
        parents = np.array([[-1, 0, 0, 2]], np.int32)
        mask, positions, bases = np.zeros((1, 4, 1), np.uint32), ints(1, 4), np.array([2], np.int32)
        self.session.tree_prepare(parents=parents, bases=bases, mask=mask, positions=positions)
        self.assertEqual((mask.ravel().tolist(), positions.tolist()), ([1, 3, 5, 13], [[2, 3, 3, 4]]))

        tokens, logits = np.array([[9, 5, 6, 7]], np.int32), floats(1, 4, 10)
        for node, token in enumerate([6, 1, 7, 8]):
            logits[0, node, token] = 1
        accepted, path, next_token = ints(1), ints(1, 4), ints(1)
        outputs = dict(accepted=accepted, path=path, next_token=next_token)
        self.session.verify_tree(tokens=tokens, parents=parents, logits=logits, **outputs)
        self.assertEqual((accepted[0], path.tolist(), next_token[0]), (2, [[0, 2, 3, -1]], 8))

        # A token of each row has all mass, so that sampling draws what is likeliest.
        logits[logits == 0] = -1000
        noise = dict(seeds=np.array([7]), positions=np.array([0]), temperature=np.ones(1, np.float32))
        for walk in "coupled", "independent", "distinct":
            path.fill(9)
            given = dict(tokens=tokens, parents=parents, logits=logits, walk=walk, **noise, **outputs)
            self.assertEqual(self.session.verify_tree_scratch(**given), 0)
            self.session.verify_tree(**given)
            self.assertEqual((accepted[0], path.tolist(), next_token[0]), (2, [[0, 2, 3, -1]], 8))

        caches = [self.random.standard_normal((3, 2, 4)).astype(kind) for kind in (np.float16, np.float64)]
        before = [cache.reshape(6, 4).copy() for cache in caches]
        with vanward.Compactor(self.session, caches) as compactor:
            table = np.array([[0, 1, 2]], np.int32)
            compactor.compact(page_table=table, bases=bases, path=path, accepted=accepted)
        for cache, rows in zip(caches, before, strict=True):
            np.testing.assert_array_equal(cache.reshape(6, 4), rows[[0, 1, 2, 4, 5, 5]])

    def test_minmax_summaries_and_block_selection(self):
        q, kv, k, _ = self.sequence()
        blocks = [k[i : i + 4] for i in range(0, 23, 4)]
        index = Index(IndexKind.MINMAX, block_size=4, key_max=floats(1, 6, 2, 16), key_min=floats(1, 6, 2, 16))
        self.session.index_update(k=kv.k, page_table=kv.page_table, seq_lens=kv.seq_lens, index=index)
        np.testing.assert_array_equal(index.key_max[0], [b.max(0) for b in blocks])
        np.testing.assert_array_equal(index.key_min[0], [b.min(0) for b in blocks])

        selected, scores = BlockList(ints(1, 2, 3), ints(1, 2)), floats(1, 2, 6)
        self.session.select_blocks(
            method="minmax",
            block_size=4,
            k=3,
            local_blocks=1,
            q=q,
            index=index,
            seq_lens=kv.seq_lens,
            selected=selected,
            scores=scores,
        )
        for g in range(2):
            heads = q[0, 3 * g : 3 * g + 3].astype(np.float64)
            want = np.array(
                [(np.maximum(heads, 0) @ b[:, g].max(0) + np.minimum(heads, 0) @ b[:, g].min(0)).sum() for b in blocks]
            )
            np.testing.assert_allclose(scores[0, g], want, atol=1e-4)  # sums of 96 float32 products of size 1
            want[5] = math.inf  # the last block is forced
            self.assertEqual(selected.ids[0, g].tolist(), sorted(np.argsort(-want)[:3]))
        self.assertEqual(selected.counts.tolist(), [[3, 3]])

    def test_one_call_updates_the_summaries_of_several_layers(self):
        layers = [self.sequence()[1] for _ in range(3)]

        def updates():
            for kv in layers:
                index = Index.minmax(kv.k, batch=1, tokens=23, block_size=4)
                yield dict(index=index, k=kv.k, page_table=kv.page_table, seq_lens=kv.seq_lens)

        alone, together = list(updates()), list(updates())
        for update in alone:
            self.session.index_update(**update)
        prepared = [self.session.prepare_index_update(**update) for update in together]
        call = self.session.prepare_index_update_layers(updates=prepared)
        del prepared
        gc.collect()

        def expect_the_same():
            call()
            for one, other in zip(alone, together, strict=True):
                np.testing.assert_array_equal(one["index"].key_max, other["index"].key_max)
                np.testing.assert_array_equal(one["index"].key_min, other["index"].key_min)

        expect_the_same()
        # Later keys of the same arrays.
        for kv, update in zip(layers, alone, strict=True):
            kv.k += 1
            self.session.index_update(**update)
        expect_the_same()
        self.session.index_update_layers(updates=[])

        # An update that is wrong is named by its place, and the one before it is not made.
        right, wrong = (self.session.prepare_index_update(**together[n]) for n in range(2))
        wrong.args.k.ndim = 3
        together[0]["index"].key_max[:] = 7
        with self.assertRaisesRegex(vanward.InvalidArgument, r"^index_update_layers: updates\[1\]\.k: "):
            self.session.index_update_layers(updates=[right, wrong])
        self.assertTrue((together[0]["index"].key_max == 7).all())
        with self.assertRaisesRegex(vanward.InvalidArgument, r"updates\[2\]\.index: .*updates\[1\]\.index"):
            twice = self.session.prepare_index_update(**together[1])
            self.session.index_update_layers(updates=[right, self.session.prepare_index_update(**together[1]), twice])
        expected = r"^index_update_layers: updates\[1\]: dict; expected what prepare_index_update gives$"
        with self.assertRaisesRegex(TypeError, expected):
            self.session.index_update_layers(updates=[right, together[1]])
        with self.assertRaisesRegex(TypeError, "^index_update_layers: updates: Call; expected a list$"):
            self.session.index_update_layers(updates=right)

    def test_attention_repair_and_merge(self):
        q, kv, k, v = self.sequence()
        predicted = BlockList(np.array([[[0, 2, 3], [1, 2, 5]]], np.int32), np.full((1, 2), 3, np.int32))
        selected = BlockList(np.array([[[0, 3, 4], [1, 2, 5]]], np.int32), np.full((1, 2), 3, np.int32))

        def dense(*lists):
            out, lse = np.zeros((1, 6, 16)), np.zeros((1, 6))
            for h in range(6):
                tokens = [t for t in range(23) if any(t // 4 in chosen.ids[0, h // 3] for chosen in lists)]
                s = k[tokens, h // 3] @ q[0, h].astype(np.float64) / 4
                out[0, h], lse[0, h] = softmax(s) @ v[tokens, h // 3], np.log(np.exp(s).sum())
            return out, lse

        out, lse = floats(1, 6, 16), floats(1, 6)
        state = AttentionState(floats(1, 6, 16), floats(1, 6), floats(1, 6))
        partials = AttentionPartials(floats(1, 6, 3, 16), floats(1, 6, 3), floats(1, 6, 3))
        self.session.attention(
            q=q, kv=kv, list=predicted, block_size=4, out=out, lse=lse, state=state, partials=partials
        )

        def close(found, want):
            np.testing.assert_allclose(found, want, atol=2e-6)  # a few float32 roundings of 1

        close(out, dense(predicted)[0])
        close(lse, dense(predicted)[1])

        again, missed = dict(q=q, kv=kv, block_size=4, predicted=predicted, selected=selected, out=out), ints(1, 2)
        exact, superset = vanward.RepairMode.EXACT, vanward.RepairMode.SUPERSET
        self.session.repair(**again, mode=exact, predicted_partials=partials, missed_counts=missed)
        close(out, dense(selected)[0])
        self.assertEqual(missed.tolist(), [[1, 0]])
        self.session.repair(**again, mode=superset, predicted_state=state, lse=lse)
        close(out, dense(predicted, selected)[0])
        close(lse, dense(predicted, selected)[1])

        self.session.merge_states(inputs=[state, state], out=out, lse=lse)
        close(out, dense(predicted)[0])
        close(lse, dense(predicted)[1] + math.log(2))

        everything = BlockList(np.tile(np.arange(6), (1, 2, 1)), None)
        self.session.attention(q=q, kv=kv, out=out)
        close(out, dense(everything)[0])

    def test_half_types_pass_as_they_are(self):
        q, kv, k, v = self.sequence(group=1)
        out = np.zeros((1, 2, 16), np.float16)
        kv.k, kv.v = kv.k.astype(np.float16), kv.v.astype(np.float16)
        self.session.attention(q=q.astype(np.float16), kv=kv, out=out)
        want = [softmax(k[:, h] @ q[0, h] / 4) @ v[:, h] for h in range(2)]
        np.testing.assert_allclose(out[0], want, atol=5e-3)  # inputs rounded to 11 bits

        def bf16(x):
            return vanward.bfloat16((x.view(np.uint32) >> 16).astype(np.uint16))

        bits = np.zeros((1, 2, 16), np.uint16)
        kv.k, kv.v = bf16(kv.k.astype(np.float32)), bf16(kv.v.astype(np.float32))
        self.session.attention(q=bf16(q), kv=kv, out=vanward.bfloat16(bits))
        found = (bits.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(found[0], want, atol=5e-2)  # inputs cut to 8 bits

    def test_channels_labels_tokens_and_mass(self):
        q, kv, k, _ = self.sequence()
        channels, importance = ints(2, 16), floats(2, 16)
        self.session.channel_importance(
            q=np.repeat(q, 4, 0), k=k.astype(np.float32), channels=channels[:, :8], importance=importance
        )
        want = np.abs(q[0]).reshape(2, 3, 16).mean(1) * np.abs(k).max(0)
        np.testing.assert_allclose(importance, want, rtol=1e-6)
        for g in range(2):
            self.assertEqual(channels[g, :8].tolist(), sorted(np.argsort(-want[g])[:8]))

        # With every channel labelled, the order of the tokens is that of q·k up to the rounding of INT4.
        channels[:] = np.arange(16)
        index = Index(
            IndexKind.LABEL,
            labels=np.zeros((1, 23, 2, 8), np.uint8),
            label_scale=np.zeros((1, 23, 2), np.float16),
            label_min=np.zeros((1, 23, 2), np.float16),
            channels=channels,
        )
        self.session.index_update(k=kv.k, page_table=kv.page_table, seq_lens=kv.seq_lens, index=index)
        codes = np.stack([index.labels[0] & 15, index.labels[0] >> 4], -1).reshape(23, 2, 16)
        near = index.label_min[0, ..., None] + index.label_scale[0, ..., None] * codes.astype(np.float64)
        step = index.label_scale[0].astype(np.float64)[..., None]
        self.assertTrue((np.abs(near - k) <= 0.51 * step + 2e-3).all())  # half a step, and float16 of the minimum

        candidates = BlockList(np.array([[[0, 2, 5], [1, 3, 4]]], np.int32), np.full((1, 2), 3, np.int32))
        selected, scores = BlockList(ints(1, 2, 4), ints(1, 2)), floats(1, 2, 4)
        common = dict(block_size=4, q=q, index=index, seq_lens=kv.seq_lens, candidates=candidates)
        self.session.select_tokens(**common, k=4, selected=selected, scores=scores)
        masses = floats(1, 2, 6)
        blocks = BlockList(ints(1, 2, 2), ints(1, 2))
        method = vanward.SelectMethod.LABEL_MASS
        self.session.select_blocks(**common, k=2, method=method, selected=blocks, scores=masses)
        for g in range(2):
            tokens = np.array([t for t in range(23) if t // 4 in candidates.ids[0, g]])
            weight = np.array(
                [softmax(near[tokens, g] @ q[0, h].astype(np.float64) / 4) for h in range(3 * g, 3 * g + 3)]
            )
            best = np.sort(np.argsort(-weight.mean(0), kind="stable")[:4])
            self.assertEqual(selected.ids[0, g].tolist(), tokens[best].tolist())
            np.testing.assert_allclose(scores[0, g], weight.mean(0)[best], rtol=1e-4)
            mass = {b: weight[:, tokens // 4 == b].sum() for b in candidates.ids[0, g]}
            np.testing.assert_allclose([masses[0, g, b] for b in mass], list(mass.values()), rtol=1e-4)
            self.assertEqual(blocks.ids[0, g].tolist(), sorted(sorted(mass, key=mass.get)[-2:]))

    def test_topk(self):
        scores = np.array([[1, 5, 2, 5, 4], [np.nan, 3, -1, 0, 7]], np.float32)
        ids, counts, values = ints(2, 3), ints(2), floats(2, 3)
        self.session.topk(k=3, scores=scores, ids=ids, counts=counts)
        self.assertEqual(ids.tolist(), [[1, 3, 4], [1, 3, 4]])
        lens = np.array([5, 3], np.int32)
        self.session.topk(k=3, scores=scores, ids=ids, counts=counts, values=values, lens=lens, order="best_first")
        self.assertEqual(ids.tolist(), [[1, 3, 4], [1, 2, 0]])
        self.assertEqual(values[0].tolist(), [5, 5, 4])
        self.assertEqual(counts.tolist(), [3, 3])

    def test_axes_and_block_selection(self):
        q, kv, k, _ = self.sequence()
        weights, centre = floats(2, 16), floats(2, 16)
        self.session.channel_importance(q=np.repeat(q, 4, 0), k=k.astype(np.float32), weights=weights, centre=centre)
        np.testing.assert_allclose(weights, np.abs(q[0]).reshape(2, 3, 16).mean(1), rtol=1e-6)
        np.testing.assert_allclose(centre, k.mean(0), rtol=1e-5, atol=1e-6)

        axes = floats(1, 6, 2, 32)
        index = Index(IndexKind.AXIS, block_size=4, axes=axes, axis_weights=weights, axis_centre=centre)
        self.session.index_update(k=kv.k, page_table=kv.page_table, seq_lens=kv.seq_lens, index=index)
        selected, scores = BlockList(ints(1, 2, 3), ints(1, 2)), floats(1, 2, 6)
        self.session.select_blocks(
            method="axis", block_size=4, k=3, index=index, q=q, seq_lens=kv.seq_lens, selected=selected, scores=scores
        )
        for g in range(2):
            mean = np.stack([k[4 * j : 4 * j + 4, g].mean(0) - centre[g] for j in range(6)])
            np.testing.assert_allclose(axes[0, :, g, :16], mean, atol=1e-5)
            heads = q[0, 3 * g : 3 * g + 3].astype(np.float64) / 4
            along = axes[0, :, g, 16:] @ heads.T
            mass = sum(softmax(mean @ head + np.log(2 * np.cosh(a))) for head, a in zip(heads, along.T, strict=True))
            np.testing.assert_allclose(scores[0, g], mass, rtol=1e-3)
            self.assertEqual(selected.ids[0, g].tolist(), sorted(np.argsort(-mass)[:3]))

    def test_what_a_selection_leaves_out_is_one_term(self):
        q, kv, k, v = self.sequence()
        remainder = vanward.Remainder.empty(kv.k, kv.v, sequences=1)
        self.session.remainder_update(block_size=4, kv=kv, remainder=remainder)
        # Of 23 tokens five blocks are whole, and the first is left out.
        self.assertEqual(remainder.tokens.tolist(), [[16, 16]])
        mean_k, mean_v = k[4:20].mean(0), v[4:20].mean(0)
        covariance = np.einsum("tgc,tgd->gcd", k[4:20] - mean_k, v[4:20] - mean_v) / 16
        np.testing.assert_allclose(remainder.mean_k[0], mean_k, atol=1e-5)
        np.testing.assert_allclose(remainder.mean_v[0], mean_v, atol=1e-5)
        np.testing.assert_allclose(remainder.covariance[0], covariance, atol=1e-5)

        axes, centre = floats(1, 6, 2, 32), self.random.standard_normal((2, 16), np.float32)
        index = Index(IndexKind.AXIS, block_size=4, axes=axes, axis_centre=centre)
        self.session.index_update(k=kv.k, page_table=kv.page_table, seq_lens=kv.seq_lens, index=index)
        selected, log_mass = BlockList(ints(1, 2, 3), ints(1, 2)), floats(1, 6)
        call = dict(method="axis", block_size=4, k=3, local_blocks=1, index=index, q=q, seq_lens=kv.seq_lens)
        self.session.select_blocks(**call, selected=selected, log_mass=log_mass)
        out, state = floats(1, 6, 16), AttentionState(floats(1, 6, 16), floats(1, 6), floats(1, 6))
        self.session.attention(
            kv=kv, q=q, block_size=4, list=selected, out=out, state=state, remainder=remainder, log_mass=log_mass
        )
        for h in range(6):
            g, query = h // 3, q[0, h].astype(np.float64) / 4
            ids = selected.ids[0, g].tolist()
            left = [j for j in range(5) if j not in ids]
            mean, axis = axes[0, left, g, :16] + centre[g], axes[0, left, g, 16:]
            mass = (4 * np.exp(mean @ query) * np.cosh(0.7 * (axis @ query))).sum()
            self.assertAlmostEqual(float(log_mass[0, h]), math.log(mass), places=4)
            tokens = [t for j in ids for t in range(4 * j, min(4 * j + 4, 23))]
            weights = np.exp(k[tokens, g] @ query)
            term = mean_v[g] + 0.5 * covariance[g].T @ query
            wanted = (weights @ v[tokens, g] + mass * term) / (weights.sum() + mass)
            np.testing.assert_allclose(out[0, h], wanted, atol=1e-4)

    def test_gather(self):
        source, target = np.arange(12, dtype=np.int16).reshape(4, 3), np.full((3, 3), -1, np.int16)
        self.session.gather_blocks(
            source=source,
            target=target,
            source_ids=np.array([3, -1, 0, 1], np.int32),
            target_ids=np.array([0, 1, 2, 1], np.int32),
            count=np.array([3], np.int32),
        )
        self.assertEqual(target.tolist(), [[9, 10, 11], [-1, -1, -1], [0, 1, 2]])

    def test_kv_cache(self):
        options = dict(layers=1, kv_heads=1, block_size=2, key_dim=16, value_dim=16, dtype="float32", max_sequences=2)
        options.update(max_blocks=4, host_blocks=4, slots=4)
        with vanward.KvCache(self.session, **options) as cache:
            sequence = cache.add()
            cache.extend(sequence, 8)
            rows = np.repeat(np.arange(8, dtype=np.float32), 16).reshape(1, 8, 1, 16)
            sequences, begin = np.array([sequence], np.int32), ints(1)
            cache.append(layer=0, sequences=sequences, begin=begin, k=rows, v=rows)
            wanted = BlockList(np.array([[[0, 3]]], np.int32), np.array([[2]], np.int32), ints(1, 1, 2))
            resident = BlockList(ints(1, 1, 2), ints(1, 1), ints(1, 1, 2))
            missed = ints(1, 1)
            cache.resolve(layer=0, sequences=sequences, wanted=wanted, resident=resident, missed_counts=missed)
            self.assertEqual((missed.tolist(), resident.counts.tolist(), resident.ids[0, 0, 0]), ([[1]], [[1]], 3))
            cache.fetch(0)
            cache.wait(0)
            out, view = floats(1, 1, 16), cache.view(0)
            kv = vanward.PagedKV(view.k, view.v, np.array([8], np.int32))
            self.session.attention(block_size=2, kv=kv, q=floats(1, 1, 16), list=wanted, out=out)
            np.testing.assert_allclose(out, (0 + 1 + 6 + 7) / 4)
            fork = cache.fork(sequence, 6)
            cache.truncate(sequence, 2)
            info = cache.info()
            self.assertEqual((info.sequences, info.blocks_in_use, info.misses), (2, 3, 1))
            self.assertEqual(info.host_bytes, vanward.KvCache.capacity(**options).host_bytes)
            self.assertEqual(cache.layer_info(0)._replace(device_bytes=0), info._replace(device_bytes=0))
            cache.free(fork)
            with self.assertRaisesRegex(vanward.InvalidArgument, "sequence"):
                cache.free(fork)
        shares = vanward.KvCache.share_slots(total=300, least=1, slots=[100, 100], misses=[399, 99])
        self.assertEqual(shares, [200, 100])
        of_two = {**options, "layers": 2, "slots": 0, "layer_slots": shares}
        with vanward.KvCache(self.session, **of_two) as cache:
            self.assertEqual(cache.view(0).k.shape[0] - cache.view(1).k.shape[0], 100)
        with self.assertRaisesRegex(ValueError, "layer_slots: 2 numbers"):
            vanward.KvCache.capacity(**{**of_two, "layers": 3})
        coded = dict(layers=1, kv_heads=1, block_size=16, key_dim=64, value_dim=64, dtype="float32", max_sequences=1)
        coded.update(max_blocks=4, host_blocks=4, slots=4, coding="int4", weights=[1.0] * 64)
        with vanward.KvCache(self.session, **coded) as cache:
            view = cache.view(0)
            assert view.int4_k is not None and view.int4 is not None
            self.assertEqual((view.k.shape[0], tuple(view.int4_k.shape)[:2], view.int4.block_size), (4, (4, 16), 16))
        decoded = {**coded, "slot_coding": "decoded"}
        sizes, larger = (vanward.KvCache.capacity(**options) for options in (coded, decoded))
        self.assertEqual((sizes.slot_bytes, larger.slot_bytes), (sizes.run_bytes, 16 * 128 * 4))
        with vanward.KvCache(self.session, **decoded) as cache:
            view = cache.view(0)
            self.assertEqual((view.k.shape[0], view.int4_k, view.int4), (8, None, None))
        with self.assertRaisesRegex(vanward.InvalidArgument, "slot_coding"):
            vanward.KvCache.capacity(**{**decoded, "coding": "exact", "weights": None})
        with self.assertRaisesRegex(ValueError, "slot_coding"):
            vanward.KvCache.capacity(**{**decoded, "slot_coding": "int4"})
        with self.assertRaisesRegex(ValueError, "weights: 1 numbers"):
            vanward.KvCache.capacity(**{**coded, "weights": [1.0]})
        with self.assertRaisesRegex(ValueError, "coding"):
            vanward.KvCache.capacity(**{**coded, "coding": "int8"})
        with self.assertRaisesRegex(ValueError, "misses: 1 numbers"):
            vanward.KvCache.share_slots(total=1, least=1, slots=[1, 1], misses=[1])
        with self.assertRaisesRegex(vanward.InvalidArgument, "total: 1"):
            vanward.KvCache.share_slots(total=1, least=1, slots=[1, 1], misses=[1, 1])
        with self.assertRaisesRegex(ValueError, "dtype"):
            vanward.KvCache.capacity(**{**options, "dtype": "int8"})

    def test_predictor(self):
        state = PredictorState(np.full((1, 1, 3), 9, np.float32), np.full((1, 1, 3), 9, np.float32))
        lens = np.array([6], np.int32)
        self.session.predictor_reset(state=state)
        self.assertEqual((state.level.tolist(), state.trend.tolist()), ([[[-math.inf] * 3]], [[[0.0] * 3]]))
        holt = Holt(0.5, 0.5, 1.0)
        for scores in ([3, 1, 2], [3, 5, 2]):
            scores = np.array([[scores]], np.float32)
            self.session.predictor_update(block_size=2, state=state, seq_lens=lens, scores=scores, holt=holt)
        self.assertEqual((state.level.tolist(), state.trend.tolist()), ([[[3, 3, 2]]], [[[0, 1, 0]]]))
        predicted, scores = BlockList(ints(1, 1, 2), ints(1, 1)), floats(1, 1, 3)
        self.session.predictor_predict(
            block_size=2, k=1, ratio=2, state=state, seq_lens=lens, predicted=predicted, holt=holt, scores=scores
        )
        self.assertEqual(scores.tolist(), [[[3, 4, 2]]])
        self.assertEqual(predicted.ids.tolist(), [[[0, 1]]])

        history = np.tile(np.array([3, 1, 2], np.float32), (1, 4, 1, 1))
        counts = np.full((1, 4), 3, np.int32)
        best, rate = self.session.predictor_calibrate(
            k=2, scores=history, block_counts=counts, grid=[Holt(), Holt(0.5)]
        )
        self.assertEqual((best, rate), (Holt(1, 0, 0), 1))

    def test_forecast(self):
        n, inputs, heads, dim = 400, 24, 2, 16
        x = self.random.standard_normal((n, inputs), np.float32)
        normal = np.c_[x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True)), np.ones(n)]
        q = (normal @ self.random.standard_normal((inputs + 1, heads * dim))).reshape(n, heads, dim).astype(np.float32)
        gram = normal.T @ normal
        ridge = 1e-3 * np.trace(gram) / (inputs + 1) * np.eye(inputs + 1)
        want = (normal @ np.linalg.solve(gram + ridge, normal.T @ q.reshape(n, -1))).reshape(n, heads, dim)

        with vanward.Forecast(self.session, layers=2, input_dim=inputs, q_heads=heads, head_dim=dim) as fitted:
            fitted.accumulate(layer=1, x=x[:150], q=q[:150])
            fitted.accumulate(layer=1, x=x[150:], q=q[150:])
            fitted.solve()
            self.assertEqual((fitted.info().layers, fitted.info().solved), (2, 1))
            found = floats(n, heads, dim)
            project = fitted.prepare_project(layer=1, x=x, positions=ints(n), q=found)
            project()
            np.testing.assert_allclose(found, want, atol=1e-3)  # sums of 25 products of size 5 in float32

            # Position 1 turns each pair (c, c + D/2) by theta^(−2c/D).
            fitted.project(layer=1, x=x, positions=np.ones(n, np.int32), q=found, rope=vanward.Rope(theta=100.0))
            angle = 100.0 ** (-np.arange(dim // 2) / (dim // 2))
            low, high = want[..., : dim // 2], want[..., dim // 2 :]
            turned = np.concatenate(
                [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], -1
            )
            np.testing.assert_allclose(found, turned, atol=1e-3)

            with self.assertRaises(vanward.Error):
                fitted.save("/nowhere/maps.safetensors")
        with self.assertRaisesRegex(vanward.InvalidArgument, "forecast: NULL"):
            project()

    def test_a_budget_is_measured_saved_loaded_and_asked(self):
        shape = dict(query_heads=2, kv_heads=1, key_dim=16, value_dim=16, dtype="float32", page_size=8, block_size=8)
        options = dict(shape, method="minmax", k=2, repair_mode="superset")
        grid = dict(max_draft=2, contexts=[8, 32], batches=[1], ratios=[1, 1.5], samples=1, limit_bytes=1 << 18)
        with vanward.Budget.profile(self.session, **options, **grid) as measured, tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "budget.safetensors")
            measured.save(path)
            with vanward.Budget.load(self.session, path, **options) as loaded:
                question = dict(acceptance=0.9, coverage={1.5: 0.9})
                answer = measured.ask(20, **question)
                self.assertEqual(loaded.ask(20, **question), answer)
            self.assertTrue(answer.dense_us > 0 and answer.prr_gain > 0 and answer.self_gain > 0)
            self.assertEqual((answer.extrapolated, measured.ask(64).extrapolated), (False, True))
            # A decoder asks it itself, step by step.
            policy = vanward.DecoderPolicy(method=vanward.SelectMethod.MINMAX, k=2, strategy=vanward.Strategy.PRR)
            layers = dict(shape, layers=2, max_rows=1, pages=4, policy=policy, budget=measured)
            with vanward.Decoder(self.session, **layers, coverage=0.5) as decoder:
                decoder.begin(seq_lens=np.array([20], np.int32), page_table=np.arange(4, dtype=np.int32)[None], longest=20)
                info = decoder.info()
                self.assertTrue(info.fallbacks == info.fallback_layers <= 2)
            with self.assertRaisesRegex(vanward.InvalidArgument, "options.query_heads: 4; expected 2, with which"):
                vanward.Decoder(self.session, **dict(layers, query_heads=4))
            with self.assertRaisesRegex(vanward.InvalidArgument, "options.k: 3; expected 2, with which"):
                vanward.Budget.load(self.session, path, **dict(options, k=3))
            with self.assertRaisesRegex(ValueError, "budget_load: contexts: 17 values; expected at most 16"):
                vanward.Budget.load(self.session, path, **options, contexts=[1] * 17)
            with self.assertRaisesRegex(vanward.InvalidArgument, "budget_ask: question.context: 0"):
                measured.ask(0)

    def test_a_forecast_is_saved_and_loaded(self):
        x, q = (self.random.standard_normal(shape, np.float32) for shape in ((64, 8), (64, 1, 16)))
        with vanward.Forecast(self.session, layers=1, input_dim=8, q_heads=1, head_dim=16) as fitted:
            fitted.accumulate(layer=0, x=x, q=q)
            fitted.solve(rank=4)
            found, again = floats(64, 1, 16), floats(64, 1, 16)
            fitted.project(layer=0, x=x, positions=ints(64), q=found)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "maps.safetensors")
                fitted.save(path)
                with vanward.Forecast.load(self.session, path) as loaded:
                    self.assertEqual(loaded.info().rank, 4)
                    loaded.project(layer=0, x=x, positions=ints(64), q=again)
        np.testing.assert_array_equal(found, again)


if __name__ == "__main__":
    unittest.main()
