"""Sessions, errors and prepared calls."""

import gc
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest
import weakref
from pathlib import Path

import numpy as np

import vanward
from tests.support import cpu_session, ints


def verify_arguments(batch=1, gamma=3, **changed):
    arguments = dict(
        draft=np.zeros((batch, gamma), np.int32),
        target=np.zeros((batch, gamma + 1), np.int32),
        accepted=ints(batch),
        next_token=ints(batch),
    )
    return arguments | changed


class Withheld:
    """An array that does not export itself, as torch's that require a gradient."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        raise BufferError("not today")


class Sessions(unittest.TestCase):
    def test_a_session_says_what_it_runs_on(self):
        with cpu_session() as session:
            info = session.info()
            self.assertEqual((info.device, info.threads, info.driver_version), (vanward.Device.CPU, 2, 0))
            self.assertEqual(session.stream(vanward.StreamRole.PREFETCH), 0)
            session.reserve(1 << 20)

    def test_a_closed_session_fails_and_closes_again(self):
        session = cpu_session()
        call = session.prepare_verify(**verify_arguments())
        call()
        session.close()
        session.close()
        for use in (call, session.info, lambda: session.verify(**verify_arguments())):
            with self.assertRaisesRegex(vanward.InvalidArgument, "session: NULL"):
                use()

    def test_a_child_of_fork_gets_an_error_and_makes_a_session_of_its_own(self):
        program = """
import os, numpy as np, vanward
arguments = dict(draft=np.zeros((1, 3), np.int32), target=np.zeros((1, 4), np.int32),
                 accepted=np.zeros(1, np.int32), next_token=np.zeros(1, np.int32))
session = vanward.Session("cpu", threads=2)
child = os.fork()
if child == 0:
    try:
        session.verify(**arguments)
    except vanward.InvalidArgument:
        vanward.Session("cpu", threads=2).verify(**arguments)
        os._exit(7)
    os._exit(1)
session.verify(**arguments)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        self.assertEqual(done.stdout, "7\n")

    def test_options_are_checked(self):
        with self.assertRaisesRegex(vanward.InvalidArgument, "options.device: 99"):
            vanward.Session(99)
        with self.assertRaisesRegex(vanward.InvalidArgument, "options.threads"):
            vanward.Session(vanward.Device.CPU, threads=100_000)

        with self.assertRaisesRegex(ValueError, "threads: -1; expected at least 0"):
            vanward.Session("cpu", threads=-1)
        with self.assertRaisesRegex(ValueError, "device: 'gpu'; expected one of auto, cpu, cuda"):
            vanward.Session("gpu")

    def test_sessions_log_to_python(self):
        lines = []
        vanward.Session("cpu", log=lambda *line: lines.append(line), log_level="info", check="nothing").close()
        [(level, text)] = lines
        self.assertEqual(level, vanward.LogLevel.INFO)
        self.assertRegex(text, "^session on the CPU")
        vanward.Session("cpu", log=lambda *line: lines.append(line), log_level="warning").close()
        self.assertEqual(len(lines), 1)
        with self.assertRaisesRegex(vanward.InvalidArgument, "options.variants: "):
            vanward.Session("cpu", variants="predictor=unknown")

    def test_log_lives_as_long_as_what_was_made_with_the_session(self):
        def made(session, path):
            sizes = dict(layers=1, kv_heads=1, block_size=16, key_dim=16, value_dim=16, dtype="float32")
            cache = vanward.KvCache(session, **sizes, max_sequences=1, max_blocks=4, host_blocks=4, slots=4)
            yield cache
            yield vanward.Decoder(session, **sizes, max_rows=1, query_heads=1, page_size=16, pages=1)
            yield vanward.Decoder(session, **sizes, max_rows=1, query_heads=1, cache=cache)
            yield vanward.Compactor(session, [np.zeros((1, 16), np.float32)])
            forecast = vanward.Forecast(session, layers=1, input_dim=2, q_heads=1, head_dim=2)
            forecast.accumulate(layer=0, x=np.ones((1, 2), np.float32), q=np.ones((1, 1, 2), np.float32))
            forecast.solve()
            forecast.save(path)
            yield forecast
            yield vanward.Forecast.load(session, path)

        with tempfile.TemporaryDirectory() as folder:
            for n in range(6):
                log = lambda *line: None  # noqa: E731
                kept, session = weakref.ref(log), vanward.Session("cpu", log=log)
                handle = list(made(session, f"{folder}/forecast"))[n]
                del log, session
                gc.collect()
                self.assertIsNotNone(kept(), type(handle))
                del handle
                gc.collect()
                self.assertIsNone(kept())

    def test_sessions_that_check_contents_name_the_element(self):
        lens, counts = np.array([3, 4], np.int32), np.zeros(2, np.int32)
        arguments = dict(k=2, scores=np.zeros((2, 3), np.float32), lens=lens, ids=np.zeros((2, 2), np.int32), counts=counts)
        with vanward.Session("cpu", check="contents") as session:
            with self.assertRaisesRegex(vanward.InvalidArgument, r"lens\[1\]: 4; expected 0 to 3"):
                session.topk(**arguments)
            lens[1] = 1
            session.topk(**arguments)
        self.assertEqual(counts.tolist(), [2, 1])

    def test_constants_go_by_their_names_too(self):
        with vanward.Session("cpu", threads=1) as session:
            self.assertEqual(session.info().device, vanward.Device.CPU)
            self.assertEqual(session.stream("write_back"), 0)
            with self.assertRaisesRegex(ValueError, "role: 'read'; expected one of select, "):
                session.stream("read")

    def test_scratch_is_asked_for_without_a_call(self):
        q, kv, out = (np.zeros(shape, np.float32) for shape in ((1, 1, 16), (1, 8, 1, 16), (1, 1, 16)))
        arguments = dict(kv=vanward.PagedKV(kv, kv, np.array([8], np.int32)), q=q, out=out)
        with cpu_session() as session:
            self.assertEqual(session.attention_scratch(**arguments), 0)
            with self.assertRaisesRegex(vanward.InvalidArgument, "out: "):
                session.attention_scratch(**arguments | dict(out=out[0]))
            with self.assertRaisesRegex(TypeError, r"Session\.repair_scratch\(\) missing"):
                session.repair_scratch(**arguments)
            session.forget_stream(stream=0)

    def test_pinned_memory_is_an_array(self):
        with cpu_session() as session:
            memory = session.pinned_alloc(64)
            source = np.frombuffer(memory, np.int64)
            source[:] = np.arange(8)
            target = np.zeros((1, 2), np.int64)
            session.gather_blocks(
                source=vanward.pinned(source.reshape(4, 2)), target=target, source_ids=np.array([3], np.int32)
            )
            self.assertEqual(target.tolist(), [[6, 7]])
            self.assertEqual(session.info().pinned_in_use, 64)
            session.pinned_free(memory)
            with self.assertRaises(vanward.InvalidArgument):
                session.pinned_free(memory)
            with self.assertRaises(vanward.InvalidArgument):
                session.pinned_alloc(0)


class Errors(unittest.TestCase):
    def setUp(self):
        self.session = cpu_session()
        self.addCleanup(self.session.close)

    def test_errors_carry_status_and_message(self):
        with self.assertRaises(vanward.Error) as caught:
            self.session.verify(**verify_arguments(target=np.zeros((1, 9), np.int32)))
        self.assertEqual(caught.exception.status, vanward.Status.INVALID_ARGUMENT)
        self.assertTrue(caught.exception.message.startswith("target: shape [1, 9]"))
        self.assertTrue(str(caught.exception).startswith("verify: target: "))
        self.assertIsInstance(caught.exception, ValueError)

    def test_what_is_no_argument_is_refused_by_name(self):
        wrong = [
            (dict(draft=[[1, 2, 3]]), "^verify: draft: list has neither"),
            (dict(accepted=bytes(4)), "accepted: read-only"),
            (dict(draft=np.zeros((1, 3), complex)), "draft: buffer format"),
        ]
        for changed, message in wrong:
            with self.assertRaisesRegex((TypeError, ValueError), message):
                self.session.verify(**verify_arguments(**changed))
        q, kv = np.zeros((1, 1, 16), np.float32), np.zeros((1, 8, 1, 16), np.float32)
        lens = ints(1)
        for arguments, message in [
            (dict(kv=(kv, kv)), "kv: tuple; expected PagedKV"),
            (dict(kv=vanward.PagedKV(kv, "v", lens)), "kv.v: str has neither"),
            (dict(kv=vanward.PagedKV(kv, kv, lens), block_size=-1), "block_size: -1; expected at least 0"),
            (dict(kv=vanward.PagedKV(kv, kv, lens), block_size=1.5), "block_size: 1.5; expected an integer"),
            (dict(kv=vanward.PagedKV(kv, kv, lens), block_size="page"), "block_size: 'page'; expected an integer"),
            (dict(kv=vanward.PagedKV(kv, kv, lens), scale="big"), "scale: 'big'; expected a number"),
            (dict(kv=vanward.PagedKV(Withheld(), kv, lens)), r"kv\.k: not today"),
        ]:
            with self.assertRaisesRegex((TypeError, ValueError), message):
                self.session.attention(q=q, out=q.copy(), **arguments)
        with self.assertRaisesRegex(ValueError, r"packed: 0 tensors; expected 1"):
            self.session.pack(rows=[q], packed=[], accepted=lens, offsets=ints(2))
        with self.assertRaisesRegex(TypeError, r"rows\[1\]: int has neither"):
            self.session.pack(rows=[q, 3], packed=[q, q], accepted=lens, offsets=ints(2))
        with self.assertRaisesRegex(TypeError, r"Session\.verify\(\) missing"):
            self.session.verify(draft=q)
        with self.assertRaisesRegex(TypeError, r"Session\.prepare_verify\(\) missing"):
            self.session.prepare_verify(draft=q)
        with self.assertRaisesRegex(ValueError, "path: a NUL"):
            vanward.Forecast.load(self.session, "a\0b")
        with self.assertRaisesRegex(vanward.Error, "stream"):
            self.session.verify(**verify_arguments(stream=4096))

    def test_errors_name_the_call_and_the_argument(self):
        session, one, holt = self.session, np.zeros((1, 4), np.float32), vanward.Holt()
        shape = dict(layers=1, input_dim=4, q_heads=1, head_dim=8)
        forecast = vanward.Forecast(session, **shape)
        self.addCleanup(forecast.close)
        scores = dict(scores=np.zeros((1, 2, 1, 4), np.float32), block_counts=ints(1, 2))
        sizes = dict(layers=1, kv_heads=1, block_size=4, key_dim=16, value_dim=16, dtype="float16")
        sizes.update(max_sequences=1, max_blocks=2, host_blocks=2, slots=8)
        cache = vanward.KvCache(session, **sizes)
        self.addCleanup(cache.close)
        for use, message in [
            (lambda: vanward.Session("cpu", threads=-1), "session_create: threads: -1"),
            (lambda: vanward.Session("cpu", threads=100_000), "session_create: options.threads: "),
            (lambda: session.reserve(1.5), "session_reserve: scratch_bytes: 1.5; expected an integer"),
            (lambda: session.reserve(-1), "session_reserve: scratch_bytes: -1; expected at least 0"),
            (lambda: session.stream("read"), "session_stream: role: 'read'"),
            (lambda: session.pinned_alloc("much"), "pinned_alloc: size: 'much'"),
            (lambda: session.verify(**verify_arguments(stream=self)), "verify: stream: "),
            (lambda: session.merge_states(inputs=one), "merge_states: inputs: ndarray; expected a list"),
            (lambda: session.pack(rows=one, packed=[one], accepted=one, offsets=one), "pack: rows: ndarray; "),
            (lambda: session.predictor_calibrate(k=1.5, **scores), "predictor_calibrate: k: 1.5; expected an integer"),
            (lambda: session.predictor_calibrate(k=1, ratio=0.5, **scores), "predictor_calibrate: ratio: 0.5; "),
            (lambda: session.predictor_calibrate(k=1, grid=holt, **scores), "predictor_calibrate: grid: Holt; "),
            (lambda: vanward.Forecast(session, **shape | dict(ridge="much")), "forecast_create: ridge: 'much'"),
            (lambda: vanward.Forecast(session, **shape | dict(layers=0)), "forecast_create: options.layers: 0"),
            (lambda: vanward.Forecast.load(session, 7), "forecast_load: path: "),
            (lambda: vanward.Forecast.load(session, "/nowhere/maps"), "forecast_load: /nowhere/maps"),
            (lambda: forecast.save("a\0b"), "forecast_save: path: a NUL inside"),
            (lambda: forecast.solve(1.5), "forecast_solve: rank: 1.5; expected an integer"),
            (lambda: forecast.solve(99), "forecast_solve: rank: 99"),
            (lambda: forecast.accumulate(layer=0, x=[1], q=one), "forecast_accumulate: x: list has neither"),
            (lambda: forecast.accumulate(layer=0, x=one, q=one), "forecast_accumulate: q: shape "),
            (lambda: cache.extend(0, -1), "kv_cache_extend: tokens: -1; expected at least 0"),
            (lambda: cache.extend(7, 1), "kv_cache_extend: sequence: 7"),
            (lambda: cache.view(7), "kv_cache_view: layer: 7"),
        ]:
            with self.subTest(message):
                with self.assertRaises((TypeError, ValueError, OSError)) as caught:
                    use()
                self.assertTrue(str(caught.exception).startswith(message), caught.exception)

    def test_a_constructor_that_fails_says_so_once(self):
        """And nothing more when what it left is collected."""
        unraisable = []
        self.addCleanup(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = unraisable.append
        with cpu_session() as session:
            failing = [
                (lambda: vanward.Session("cpu", treads=1), "Session.__init__\\(\\) got an unexpected keyword argument 'treads'"),
                (lambda: vanward.KvCache(session, layer=1), "^KvCache\\(\\) got an unexpected keyword argument 'layer'"),
                (lambda: vanward.Decoder(session), "Decoder.__init__\\(\\) missing 1 required keyword-only argument: 'dtype'"),
                (lambda: vanward.Compactor(session), "Compactor.__init__\\(\\) missing 1 required"),
                (lambda: vanward.Forecast(session, rank=1), "Forecast.__init__\\(\\) got an unexpected keyword argument 'rank'"),
                (lambda: vanward.Budget(), "Budget.__init__\\(\\) missing 1 required"),
            ]
            for call, said in failing:
                self.assertRaisesRegex(TypeError, said, call)
        gc.collect()
        self.assertEqual(unraisable, [])

    def test_errors_travel_between_processes(self):
        with self.assertRaises(vanward.InvalidArgument) as caught:
            self.session.verify(**verify_arguments(target=np.zeros((1, 9), np.int32)))
        again = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((type(again), str(again)), (vanward.InvalidArgument, str(caught.exception)))

    def test_each_thread_gets_its_own_results_and_messages(self):
        wrong = []

        def work(n):
            arguments = verify_arguments(gamma=n + 1)
            arguments["draft"][0, n] = -1
            call = self.session.prepare_verify(**arguments)
            for _ in range(200):
                arguments["accepted"][0] = -1
                call()
                if arguments["accepted"][0] != n:
                    wrong.append((n, arguments["accepted"][0]))
                try:
                    self.session.verify(**verify_arguments(target=np.zeros((1, n + 5), np.int32)))
                    wrong.append(n)
                except vanward.Error as error:
                    if f"[1, {n + 5}]" not in error.message:
                        wrong.append((n, error.message))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])


class PreparedCalls(unittest.TestCase):
    def test_a_prepared_call_sees_present_contents_and_keeps_its_arrays(self):
        with cpu_session() as session:
            accepted = ints(1)
            draft = np.array([[1, 2]], np.int32)
            call = session.prepare_verify(
                draft=draft, target=np.array([[1, 2, 3]], np.int32), accepted=accepted, next_token=ints(1)
            )
            call()
            self.assertEqual(accepted[0], 2)
            draft[0, 1] = 9
            call(0)
            self.assertEqual(accepted[0], 1)

    def test_a_session_in_use_by_a_prepared_call_is_not_collected(self):
        accepted = ints(1)
        call = cpu_session().prepare_verify(**verify_arguments(accepted=accepted))
        call()
        self.assertEqual(accepted[0], 3)


class Loading(unittest.TestCase):
    def test_the_readme_program_prints_what_it_says(self):
        readme = Path(__file__).parents[1].joinpath("README.md").read_text()
        program = readme.split("```python\n")[1].split("```")[0]
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout, "2 accepted, then 9\n")

    def test_a_library_that_is_not_there_is_an_import_error(self):
        program = "import os; os.environ['VANWARD_LIBRARY'] = '/nowhere/libvanward.so'; import vanward"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertIn("ImportError", done.stderr)
        self.assertIn("VANWARD_LIBRARY", done.stderr)


if __name__ == "__main__":
    unittest.main()
