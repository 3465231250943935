"""The decoder: a strategy by layer, what was foreseen, and what a step did."""

import gc
import unittest
import weakref
from ctypes import c_int32

import numpy as np

import vanward
from tests.support import cpu_session as session
from vanward import DecoderPolicy, Predict, Strategy


class DecoderTest(unittest.TestCase):
    PAGES, PAGE, HEADS, DIM, TOKENS = 12, 8, 2, 16, 80

    def setUp(self):
        rng = np.random.default_rng(1)
        floats = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.k, self.v = floats(self.PAGES, self.PAGE, 1, self.DIM), floats(self.PAGES, self.PAGE, 1, self.DIM)
        self.new_k, self.new_v = floats(1, 1, self.DIM), floats(1, 1, self.DIM)
        self.q, self.x = floats(1, self.HEADS, self.DIM), floats(1, 24)
        self.forecast_rows = floats(64, 24), floats(64, self.HEADS, self.DIM)
        self.table = np.arange(self.PAGES, dtype=np.int32)[None]

    def decoder(self, s, **policy):
        return vanward.Decoder(
            s,
            dtype="float32",
            policy=DecoderPolicy(method=vanward.SelectMethod.MINMAX, k=4, init_blocks=1, local_blocks=1, **policy),
            **self.sizes(),
        )

    def sizes(self):
        return dict(
            layers=1,
            max_rows=1,
            query_heads=self.HEADS,
            kv_heads=1,
            key_dim=self.DIM,
            value_dim=self.DIM,
            page_size=self.PAGE,
            pages=self.PAGES,
            block_size=self.PAGE,
        )

    def step(self, decoder, tokens, begin=None, foresee=None):
        """The output of a step whose token is number `tokens` − 1, and how many blocks it selected, predicted and missed."""
        out = np.full_like(self.q, np.nan)
        begin = None if begin is None else np.array([begin], np.int32)
        decoder.begin(seq_lens=np.array([tokens], np.int32), page_table=self.table, begin=begin)
        if foresee is not None:
            decoder.foresee(layer=0, **foresee)
        layer = dict(layer=0, k=self.k, v=self.v, new_k=self.new_k, new_v=self.new_v, q=self.q, out=out)
        self.assertEqual(decoder.attend_scratch(**layer), 0)
        decoder.attend(**layer)
        info = decoder.info()
        return out, [c_int32.from_address(t.data).value for t in (info.selected, info.predicted, info.missed)]

    def run_two_steps(self, s, foresee=None, **policy):
        with self.decoder(s, **policy) as decoder:
            self.step(decoder, self.TOKENS, begin=0)
            return self.step(decoder, self.TOKENS + 1, foresee=foresee)

    def test_remainder_joins_what_a_list_leaves_out(self):
        outs = []
        for remainder in (0, 1):
            with session() as s:
                policy = DecoderPolicy(method=vanward.SelectMethod.AXIS, k=4, init_blocks=1, local_blocks=1)
                with vanward.Decoder(s, dtype="float32", policy=policy, remainder=remainder, **self.sizes()) as decoder:
                    outs.append(self.step(decoder, self.TOKENS, begin=0)[0])
        self.assertFalse(np.array_equal(*outs))
        np.testing.assert_allclose(*outs, atol=1.0)

    def test_prr_gives_what_serial_gives_and_tells_what_it_missed(self):
        with session() as s:
            serial, counts = self.run_two_steps(s)
            self.assertEqual(counts, [4, 0, 0])
            prr, counts = self.run_two_steps(s, strategy=Strategy.PRR, holt=vanward.Holt(0.5, 0.0, 0.0))
            self.assertTrue(np.array_equal(prr, serial))
            self.assertEqual(counts[:2], [4, 5])
            wrong = dict(q=-self.q)
            prr, counts = self.run_two_steps(s, wrong, strategy=Strategy.PRR, predict=Predict.FORESEEN)
            self.assertTrue(np.array_equal(prr, serial))
            self.assertGreater(counts[2], 0)

    def test_a_layer_is_foreseen_from_queries_and_from_a_forecast(self):
        with session() as s:
            # The token of the second step begins a block, which the list gets in addition.
            _, counts = self.run_two_steps(s, dict(q=self.q), strategy=Strategy.FORESEEN)
            self.assertEqual(counts[1], 6)
            with vanward.Forecast(s, layers=1, input_dim=24, q_heads=self.HEADS, head_dim=self.DIM) as forecast:
                x, q = self.forecast_rows
                forecast.accumulate(layer=0, x=x, q=q)
                forecast.solve()
                by_stream = dict(forecast=forecast, x=self.x)
                with self.decoder(s, strategy=Strategy.FORESEEN) as decoder:
                    decoder.begin(seq_lens=np.array([self.TOKENS], np.int32), page_table=self.table)
                    x = self.x.copy()
                    is_kept = weakref.ref(x)
                    decoder.foresee(layer=0, forecast=forecast, x=x)
                    del x
                    gc.collect()
                    self.assertIsNotNone(is_kept())
                    decoder.foresee(layer=0, **by_stream)
                    gc.collect()
                    self.assertIsNone(is_kept())
                _, counts = self.run_two_steps(s, by_stream, strategy=Strategy.FORESEEN)
                self.assertEqual(counts[1], 6)

    def test_drafts_are_accepted_and_counted_until_a_reset(self):
        policy = DecoderPolicy(method=vanward.SelectMethod.MINMAX, k=4)
        sizes = dict(self.sizes(), max_positions=3, max_sequences=2)
        with session() as s, vanward.Decoder(s, dtype="float32", policy=policy, **sizes) as decoder:
            accepted, next_token, committed = np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 3), np.int32)
            decoder.accept(
                draft=np.array([[5, 6]], np.int32),
                target=np.array([[5, 7, 8]], np.int32),
                sequences=np.array([1], np.int32),
                accepted=accepted,
                next_token=next_token,
                committed=committed,
            )
            self.assertEqual((accepted.tolist(), next_token.tolist(), committed.tolist()), ([1], [7], [[5, 7, -1]]))
            counts = lambda: [  # noqa: E731
                list((c_int32 * 2).from_address(t.data)) for t in (decoder.info().drafted, decoder.info().accepted)
            ]
            self.assertEqual(counts(), [[0, 2], [0, 1]])
            decoder.reset(sequences=np.array([0], np.int32))
            self.assertEqual(counts(), [[0, 2], [0, 1]])
            decoder.reset(sequences=np.array([1], np.int32))
            self.assertEqual(counts(), [[0, 0], [0, 0]])
            decoder.reset()  # of all sequences

    def test_a_decoder_on_a_cache_attends_blocks_that_were_fetched(self):
        tokens, block = 40, 8
        values = np.repeat(np.arange(tokens, dtype=np.float32), self.DIM).reshape(tokens, 1, 1, self.DIM)
        zeros = np.zeros((1, 1, self.DIM), np.float32)
        shape = dict(layers=1, kv_heads=1, block_size=block, key_dim=self.DIM, value_dim=self.DIM, dtype="float32")
        for strategy in (Strategy.SERIAL, Strategy.VANWARD):
            with (
                session() as s,
                vanward.KvCache(s, **shape, max_sequences=2, max_blocks=5, host_blocks=5, slots=14) as cache,
                vanward.Decoder(
                    s,
                    cache=cache,
                    **shape,
                    max_rows=1,
                    query_heads=1,
                    policy=DecoderPolicy(method=vanward.SelectMethod.MINMAX, k=5, strategy=strategy),
                ) as decoder,
            ):
                sequence = cache.add()
                cache.extend(sequence, tokens)
                numbers, out, fetched = np.array([sequence], np.int32), np.zeros_like(zeros), 0
                for t in range(tokens):
                    if t == 16:  # A fork takes the whole blocks out of the tail.
                        cache.free(cache.fork(sequence, 16))
                    decoder.begin(seq_lens=np.array([t + 1], np.int32), sequences=numbers)
                    decoder.attend(layer=0, new_k=zeros, new_v=values[t], q=zeros, out=out)
                    # Every block is in the list, and every score alike: the mean of the values.
                    np.testing.assert_allclose(out, t / 2, rtol=1e-5)
                    fetched += c_int32.from_address(decoder.info().fetched.data).value
                self.assertGreater(fetched, 0)
                with self.assertRaisesRegex(vanward.InvalidArgument, "decoder_attend: k: given on a cache"):
                    decoder.attend(layer=0, k=zeros[None], new_k=zeros, new_v=zeros, q=zeros, out=out)
        with self.assertRaises(vanward.InvalidArgument), session() as s, self.decoder(s) as decoder:
            decoder.begin(seq_lens=np.array([9], np.int32), page_table=self.table)
            decoder.attend(layer=0)  # pages are missing

    def test_a_decoder_that_nobody_has_any_more_gives_its_memory_back(self):
        shape = dict(layers=1, kv_heads=1, block_size=8, key_dim=self.DIM, value_dim=self.DIM, dtype="float32")
        with session() as s:
            cache = vanward.KvCache(s, **shape, max_sequences=2, max_blocks=5, host_blocks=5, slots=14)
            policy = DecoderPolicy(method=vanward.SelectMethod.MINMAX, k=5)
            decoder = vanward.Decoder(s, cache=cache, **shape, max_rows=1, query_heads=1, policy=policy)
            cache.close()
            self.assertGreater(s.info().pinned_in_use, 0)  # the decoder keeps the cache
            del decoder
            gc.collect()
            self.assertEqual(s.info().pinned_in_use, 0)

    def test_mistakes_are_named(self):
        with session() as s:
            with self.assertRaisesRegex(vanward.InvalidArgument, r"options\.policy\.ratio: 0\.5; expected"):
                self.decoder(s, strategy=Strategy.FORESEEN, ratio=0.5)
            with self.assertRaisesRegex(TypeError, "decoder_create: block: no such field; expected one of layers, max_rows"):
                vanward.Decoder(s, dtype="float32", **self.sizes(), block=8)
            with self.decoder(s, strategy=Strategy.FORESEEN) as decoder:
                decoder.begin(seq_lens=np.array([9], np.int32), page_table=self.table)
                with self.assertRaisesRegex(vanward.InvalidArgument, "decoder_foresee: q: absent without a forecast"):
                    decoder.foresee(layer=0)


if __name__ == "__main__":
    unittest.main()
