"""Groups that allocate what calls write, and what their docstrings say."""

import re
import tempfile
import unittest
from pathlib import Path

import numpy as np

import vanward
from tests.support import cpu_session, floats
from vanward import AttentionPartials, AttentionState, BlockList, Index, PagedKV, PredictorState

SEED = 20261121
PACKAGE = Path(__file__).parents[1]


class Tensor:
    """As much of a torch tensor as allocation asks for."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def new_zeros(self, shape):
        return Tensor(np.zeros(shape, self.array.dtype))


class Shapes(unittest.TestCase):
    def test_every_group_has_the_shapes_that_calls_take(self):
        random = np.random.default_rng(SEED)
        tokens, size, cap = 90, 8, 5
        q = random.standard_normal((2, 3, 4, 16), np.float32)  # B, Q, Hq, D
        k, v = (random.standard_normal((2, tokens, 2, 16), np.float32) for _ in "kv")
        kv = PagedKV(k, v, np.array([tokens, 41], np.int32))
        indices = dict(
            minmax=Index.minmax(k, batch=2, tokens=tokens, block_size=size),
            mean_softmax=Index.mean(k, batch=2, tokens=tokens),
            axis=Index.axis(k, batch=2, tokens=tokens, block_size=size),
        )
        with cpu_session() as session:
            for each_row in (True, False):
                for method, index in indices.items():
                    session.index_update(index=index, k=k, seq_lens=kv.seq_lens)
                    selected = BlockList.empty(q, kv_heads=2, capacity=cap, each_row=each_row)
                    session.select_blocks(
                        method=method,
                        block_size=size,
                        k=cap,
                        index=index,
                        q=q,
                        seq_lens=kv.seq_lens,
                        selected=selected,
                        scores=selected.scores(-(-tokens // size)),
                        status=(status := selected.status()),
                    )
                    self.assertFalse(status.any(), method)  # every block and window has its place
                    self.assertTrue((selected.counts == cap).all())
                for partial_blocks in (1, 2):
                    session.attention(
                        kv=kv,
                        q=q,
                        list=selected,
                        block_size=size,
                        partial_blocks=partial_blocks,
                        out=np.zeros_like(q),
                        state=AttentionState.empty(q),
                        partials=AttentionPartials.empty(q, list=selected, partial_blocks=partial_blocks),
                    )

    def test_labels_have_a_place_for_every_token(self):
        random = np.random.default_rng(SEED)
        q, k = random.standard_normal((7, 2, 16), np.float32), random.standard_normal((1, 40, 1, 16), np.float32)
        channels, seq_lens = np.zeros((1, 8), np.int32), np.array([40], np.int32)
        with cpu_session() as session:
            session.channel_importance(q=q, k=k[0], channels=channels)
            index = Index.label(channels, batch=1, tokens=40)
            session.index_update(index=index, k=k, seq_lens=seq_lens)
            every = BlockList(np.arange(5, dtype=np.int32).reshape(1, 1, 5), np.full((1, 1), 5, np.int32))
            selected = BlockList.empty(q[:1], kv_heads=1, capacity=12)
            status = selected.status()
            session.select_tokens(
                block_size=8,
                k=12,
                index=index,
                q=q[:1],
                seq_lens=seq_lens,
                candidates=every,
                selected=selected,
                status=status,
            )
        self.assertEqual((selected.counts.tolist(), status.tolist()), ([[12]], [[0]]))

    def test_axes_are_stored_in_int4_or_as_the_keys_are(self):
        random = np.random.default_rng(SEED)
        size, dim = 8, 40  # two groups of channels, the last one short
        k = random.standard_normal((1, 20, 2, dim), np.float32)
        weights, centre = (random.random((2, dim), np.float32) for _ in range(2))
        for array in (weights, centre):
            array.flags.writeable = False
        read = dict(batch=1, tokens=20, block_size=size, weights=weights, centre=centre)
        packed, whole = Index.axis(k, **read), Index.axis(k, int4=False, **read)
        with cpu_session() as session:
            for index in (packed, whole):
                session.index_update(index=index, k=k, seq_lens=np.array([20], np.int32))
        codes = np.stack([packed.axes & 15, packed.axes >> 4], -1).reshape(1, 3, 2, 2, dim)
        ranges = packed.axis_range.astype(np.float32).reshape(1, 3, 2, 2, 2, 2)
        scale, least = (np.repeat(ranges[..., n], 32, -1)[..., :dim] for n in range(2))
        wanted = whole.axes.reshape(1, 3, 2, 2, dim)
        # Half a step of a code, and the rounding of scale and minimum.
        self.assertTrue((abs(least + scale * codes - wanted) <= 0.51 * scale + 0.002).all())
        mean = np.stack([k[0, j : j + size].mean(0) for j in range(0, 20, size)])
        np.testing.assert_allclose(wanted[0, :, :, 0], mean - centre, atol=1e-6)  # a mean of 8 in float32

    def test_an_empty_state_adds_nothing(self):
        q = np.random.default_rng(SEED).standard_normal((1, 2, 16), np.float32)
        some = AttentionState(q, floats(1, 2), floats(1, 2) + 2)
        out = floats(1, 2, 16)
        with cpu_session() as session:
            session.merge_states(inputs=[AttentionState.empty(q), some], out=out)
        np.testing.assert_array_equal(out, q / 2)

    def test_a_new_predictor_has_seen_nothing(self):
        seen = PredictorState.empty(floats(1), batch=2, kv_heads=3, blocks=4)
        reset = PredictorState(floats(2, 3, 4), floats(2, 3, 4) + 1)
        with cpu_session() as session:
            session.predictor_reset(state=reset)
        np.testing.assert_array_equal(seen.level, reset.level)
        np.testing.assert_array_equal(seen.trend, reset.trend)

    def test_arrays_are_of_the_library_and_the_meaning_that_they_are_used_with(self):
        bits = np.zeros((1, 8, 2, 16), np.uint16)
        index = Index.minmax(vanward.bfloat16(bits), batch=1, tokens=8, block_size=4)
        with cpu_session() as session:
            lens = np.array([8], np.int32)
            session.index_update(index=index, k=vanward.bfloat16(bits), seq_lens=lens)
        index = Index.minmax(Tensor(bits), batch=1, tokens=9, block_size=4)
        self.assertIsInstance(index.key_max, Tensor)
        self.assertEqual(index.key_max.shape, (1, 3, 2, 16))


class Files(unittest.TestCase):
    def test_a_file_that_is_not_there_is_an_os_error_with_its_number(self):
        with cpu_session() as session, tempfile.TemporaryDirectory() as folder:
            with self.assertRaises(OSError) as caught:
                vanward.Forecast.load(session, Path(folder, "nothing"))
            self.assertEqual((caught.exception.errno, caught.exception.status), (2, vanward.Status.IO))
            with self.assertRaisesRegex(OSError, "a directory"):
                vanward.Forecast.load(session, folder)


class Documentation(unittest.TestCase):
    def test_every_method_of_a_call_says_the_shapes_of_its_arguments(self):
        for method in (vanward.Session.repair, vanward.Session.prepare_repair, vanward.Session.repair_scratch):
            self.assertRegex(method.__doc__, r"missed_counts +\[B, Hk\]")
        self.assertRegex(vanward.Forecast.project.__doc__, r"\nq +\[B, q_heads, head_dim\]")
        self.assertRegex(vanward.KvCache.append.__doc__, r"\nk +\[B, T, Hk, D\]")
        self.assertRegex(vanward.BlockList.__doc__, r"ids +\[B, Hk, cap\]")
        for name, text in vars(vanward.Session).items():
            self.assertFalse(re.search(r"args->", getattr(text, "__doc__", None) or ""), name)

    def test_the_package_has_the_version_of_the_library(self):
        project = PACKAGE.joinpath("pyproject.toml").read_text()
        self.assertEqual(re.search(r'^version = "(.*)"$', project, re.M)[1], vanward.__version__)


if __name__ == "__main__":
    unittest.main()
