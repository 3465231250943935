#!/usr/bin/env python3
"""Tests of libggml-vanward.so with unmodified releases of llama.cpp. `run.py BUILD [unittest's arguments]`

BUILD is where the library and its test programs were built. VANWARD_LLAMA_LONG=1 runs every test at full length.
"""

import io
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "gpu"))
import losses
import quality
import releases
from driver import BUILD, DRIVER, EMULATOR, LIBRARY, LONG, environment, run
from output import Output


def difference(ours, stock):
    """The largest relative norm of the difference of two embeddings."""
    return max(math.dist(a, b) / math.hypot(*b) for a, b in zip(ours, stock, strict=True))


def fetched(cls):
    """The release of a class of tests, which are skipped where it cannot be had."""
    try:
        return cls.fetch()
    except releases.Missing as missing:
        raise unittest.SkipTest(f"{cls.__name__}: {missing}") from missing


class WithRelease:
    """The tests of one release; the classes below say which."""

    COMMON = {"CHECK": 1}
    GROWTH = 500
    SUMMARISED_APART = 4  # layers, of which each counts its tokens

    @classmethod
    def setUpClass(cls):
        cls.release = fetched(cls)
        cls.tiny = releases.tiny(BUILD)
        cls.windows = releases.tiny(BUILD, "gemma2")
        cls.sinks = releases.tiny(BUILD, "gpt-oss")
        cls.encoder = releases.tiny(BUILD, "bert")
        cls.encoder_decoder = releases.tiny(BUILD, "t5")
        cls.biases = releases.tiny(BUILD, "bloom")
        cls.latent = releases.tiny(BUILD, "deepseek2")

    def random_operations(self, model, options, operations, seed, threads=1):
        out = run(self.release, model, {"DENSE_BELOW": 0, "CHECK": 1, **options}, "random", operations=operations, seed=seed, threads=threads)
        print(f"{self.release.name} {options} seed {seed}: {out.counters}")
        for wrong in ["wrong_summaries", "wrong_tokens", "wrong_outputs", "errors", "passed"]:
            self.assertEqual(out[wrong], 0, f"{wrong}, seed {seed}")
        # One of 25 operations is a shift, if the sequence is long enough.
        for happened in ["sparse", "stale", "checked", *(["shifts"] if operations >= 1000 else [])]:
            self.assertGreater(out[happened], 0, f"{happened}: the operations reach nothing")

    def test_random_operations_leave_no_wrong_summary_and_show_no_wrong_token(self):
        for seed in range(20 if LONG else 1):
            self.random_operations(self.tiny, {"METHOD": "minmax"}, 5000 if LONG else 2000, 100 + seed)

    def test_random_operations_with_axis_and_blocks_of_32_tokens(self):
        for seed in range(4 if LONG else 1):
            self.random_operations(self.tiny, {"METHOD": "axis", "BLOCK": 32, "BUDGET": 64}, 5000 if LONG else 1000, 200 + seed)

    def test_random_operations_with_sliding_windows_and_soft_caps(self):
        for seed in range(4 if LONG else 1):
            self.random_operations(self.windows, {}, 5000 if LONG else 1000, 300 + seed)

    def test_random_operations_with_sliding_windows_and_sinks(self):
        for seed in range(4 if LONG else 1):
            self.random_operations(self.sinks, {}, 5000 if LONG else 1000, 500 + seed)

    def test_random_operations_around_the_threshold(self):
        out = run(self.release, self.tiny, {"DENSE_BELOW": 256, "CHECK": 1}, "random", operations=1500, seed=600)
        self.assertEqual(out["wrong_summaries"] + out["wrong_tokens"] + out["wrong_outputs"] + out["errors"], 0)
        self.assertGreater(out["declined_short"], 0)

    def test_a_sequence_that_grows_past_the_threshold_becomes_sparse(self):
        out = run(self.release, self.tiny, {**self.COMMON, "DENSE_BELOW": 300}, "score", random_text=1, depth=250, count=self.GROWTH)
        self.assertEqual(out["wrong_summaries"] + out["wrong_tokens"] + out["wrong_outputs"] + out["errors"], 0)
        self.assertGreater(out["declined_short"], 0)
        self.assertGreater(out["sparse"], 0)

    def test_dense_layers_are_never_sparse(self):
        out = self.cases(self.tiny, {**self.COMMON, "DENSE_BELOW": 0, "DENSE_LAYERS": "0,2"}, depth=100, count=6, context=1024, random_text=1)
        self.assertEqual((out["sparse"], out["dense"]), (2 * 6, 2 * 6))
        self.assertEqual(out["wrong_summaries"] + out["wrong_tokens"] + out["wrong_outputs"] + out["errors"], 0)

    def test_summaries_that_are_forgotten_are_made_anew(self):
        kept, anew = (run(self.release, self.tiny, {**self.COMMON, "DENSE_BELOW": 0}, "score", random_text=1, depth=100, count=6, forget=forget)
                      for forget in [0, 3])
        self.assertEqual(anew["wrong_summaries"] + anew["wrong_tokens"] + anew["wrong_outputs"] + anew["errors"], 0)
        self.assertEqual(anew["summarised"] - kept["summarised"], self.SUMMARISED_APART * 103)

    def test_what_replaces_a_sequence_of_the_same_length_is_noticed(self):
        for unified in [0, 1]:
            out = run(self.release, self.tiny, {**self.COMMON, "DENSE_BELOW": 0}, "restore", depth=150, count=5, context=1024, unified=unified, random_text=1)
            self.assertEqual(out["wrong_summaries"] + out["wrong_tokens"] + out["wrong_outputs"] + out["errors"] + out["passed"], 0)
            self.assertGreater(out["sparse"], 0)
            self.assertGreater(out["stale"], 0)

    def test_keys_of_a_restored_state_are_attended_to_at_once(self):
        # Unless it is not known yet on how many threads ggml computes: then llama.cpp's first graph has ggml's attention, until it is built anew.
        for options, is_taken in [({}, self.SHARES_THREADS), ({"THREADS": 1}, True)]:
            state = BUILD / f"restored-{os.getpid()}.state"
            options = {**self.COMMON, "DENSE_BELOW": 0, "BUDGET": "50%", **options}
            arguments = {"random_text": 1, "depth": 150, "count": 20, "context": 1024, "state": state}
            saved, restored = (run(self.release, self.tiny, options, "score", **arguments) for _ in range(2))
            state.unlink()
            self.assertEqual((saved["sparse"], restored["sparse"]), (4 * 20, 4 * 20 if is_taken else 0), options)
            self.assertEqual(sum(restored[wrong] for wrong in ["wrong_summaries", "wrong_tokens", "wrong_outputs", "errors", "passed"]), 0)
            if is_taken:
                self.assertEqual((restored.loss, restored.tops), (saved.loss, saved.tops))

    def test_new_caches_and_models_that_select_by_themselves_are_left_to_ggml(self):
        # llama.cpp asks who computes attention before there are keys, and takes flash attention off where that is not the layer's device.
        out = run(self.release, self.tiny, {"DENSE_BELOW": 0, "THREADS": 1}, "nodes")
        taken = {name: int(is_taken) for name, is_taken in re.findall(r"^taken (\w+) (\d)$", out.text, re.MULTILINE)}
        self.assertEqual(taken, {"new": 0, "restored": 1, "trained": 0})
        self.assertEqual((out["declined_early"], out["declined_trained"]), (1, 1))

    @unittest.skipUnless(LONG, "make test-llama runs it")
    def test_random_operations_on_two_threads(self):
        self.random_operations(self.tiny, {"THREADS": 2}, 1000, 400, threads=2)

    def test_several_threads_are_used_where_they_are_shared(self):
        taken = {"DENSE_BELOW": 0, "CHECK": 1}
        arguments = {"depth": 300, "count": 12, "context": 2048, "random_text": 1, "threads": 2}
        for options, is_taken in [({}, self.SHARES_THREADS), ({"THREADS": 2}, True)]:
            out = self.cases(self.tiny, {**taken, **options}, **arguments)
            self.assertEqual((out["sparse"] > 0, out["declined_threads"] > 0), (is_taken, not is_taken), options)
            self.assertEqual(out["wrong_outputs"] + out["wrong_tokens"] + out["wrong_summaries"] + out["errors"], 0)

    def cases(self, model, options, **arguments):
        return run(self.release, model, options, "cases", **arguments)

    def test_everything_selected_gives_stock_results_in_every_kind_of_cache(self):
        for model in [self.tiny, self.windows, self.sinks]:
            for kind in [{"sequences": 1}, {"sequences": 4, "unified": 0}, {"sequences": 4, "unified": 1}, {"sequences": 1, "type": 30}]:
                with self.subTest(model=model.name, **kind):
                    arguments = {"depth": 300, "count": 12, "context": 2048, "random_text": 1, **kind}
                    stock = self.cases(model, None, **arguments)
                    for options in [{"STRATEGY": "dense"}, {"BUDGET": "100%"}]:
                        ours = self.cases(model, {"DENSE_BELOW": 0, "CHECK": 1, **options}, **arguments)
                        self.assertGreater(ours["sparse"] + ours["dense"], 0)
                        self.assertEqual(ours["wrong_outputs"] + ours["wrong_tokens"] + ours["wrong_summaries"], 0)
                        # ggml sums values in float16.
                        self.assertLess(abs(float(ours.sum) / float(stock.sum) - 1), 5e-3)

    def test_what_is_not_taken_has_the_bits_of_stock(self):
        for name, kind, options in [
            ("quantised cache", {"type": 8, "flash": 1}, {"DENSE_BELOW": 0}),
            ("no flash attention", {"flash": 0}, {"DENSE_BELOW": 0}),
            ("below the threshold", {}, {"DENSE_BELOW": 4096}),
            ("more rows than taken", {"sequences": 4}, {"DENSE_BELOW": 0, "ROWS": 3}),
            ("switched off", {}, {"DENSE_BELOW": 0, "ENABLED": 0}),
        ]:
            with self.subTest(name):
                arguments = {"depth": 200, "count": 6, "context": 1024, "random_text": 1, **kind}
                stock = self.cases(self.tiny, None, **arguments)
                ours = self.cases(self.tiny, options, **arguments)
                self.assertEqual(ours.sum, stock.sum)
                self.assertEqual(ours["sparse"] + ours["dense"], 0)

    def test_attentions_of_more_rows_than_are_taken_are_counted(self):
        arguments = {"depth": 100, "count": 6, "context": 1024, "random_text": 1, "sequences": 4}
        taken, left = (self.cases(self.tiny, {**self.COMMON, "DENSE_BELOW": 0, "ROWS": rows}, **arguments) for rows in [4, 3])
        self.assertEqual((taken["sparse"], left["sparse"]), (4 * 6, 0))
        # Four layers and six steps; the prompts have more rows in either run.
        self.assertGreaterEqual(left["declined_rows"] - taken["declined_rows"], 4 * 6)

    def assert_only_declined(self, ours, name):
        """Whatever attention there was is ggml's for its type, and writes are left to ggml after a few graphs."""
        self.assertGreater(ours["declined_type"], 0, name)
        self.assertEqual(sum(ours[counter] for counter in ["sparse", "dense", "passed", "errors"]), 0, name)
        self.assertLessEqual(ours["writes"], 24, name)

    def test_an_encoder_without_a_cache_has_the_bits_of_stock(self):
        # With texts of 5 tokens it is not the number of rows that leaves attention to ggml.
        for depth, pooling in [(5, 0), (5, 1), (60, 1), (60, 2), (60, 3)]:
            arguments = {"depth": depth, "count": 2, "sequences": 2, "pooling": pooling, "random_text": 1}
            stock = run(self.release, self.encoder, None, "embed", **arguments)
            ours = run(self.release, self.encoder, {**self.COMMON, "DENSE_BELOW": 0}, "embed", **arguments)
            self.assertEqual(len(ours.embeddings), 6)
            self.assertEqual(ours.embeddings, stock.embeddings, arguments)
            self.assert_only_declined(ours, arguments)
            self.assertEqual(ours["writes"], 0)

    def test_biases_latent_keys_and_what_an_encoder_gives_to_a_decoder_have_the_bits_of_stock(self):
        for model in [self.biases, self.latent, self.encoder_decoder]:
            # llama.cpp itself takes T5 with one stream only.
            arguments = {"depth": 60, "count": 6, "context": 1024, "sequences": 6, "unified": 1, "random_text": 1}
            stock = self.cases(model, None, **arguments)
            ours = self.cases(model, {**self.COMMON, "DENSE_BELOW": 0}, **arguments)
            self.assertEqual(ours.sum, stock.sum, model.name)
            self.assert_only_declined(ours, model.name)

    def test_embeddings_of_a_decoder_are_those_of_stock(self):
        for pooling, unified in [(0, 0), (1, 1), (3, 1)]:
            # llama.cpp's mean over rows wants a batch whose rows are a multiple of the sequences.
            arguments = {"depth": 60, "count": 3, "rows": 3, "context": 1024, "sequences": 4, "unified": unified, "pooling": pooling, "random_text": 1}
            stock = run(self.release, self.tiny, None, "embed", **arguments)
            for options in [{"STRATEGY": "dense"}, {"BUDGET": "100%"}]:
                ours = run(self.release, self.tiny, {**self.COMMON, "DENSE_BELOW": 0, "CHECK": 1, **options}, "embed", **arguments)
                self.assertGreater(ours["sparse"] + ours["dense"], 0)
                self.assertEqual(ours["wrong_outputs"] + ours["wrong_tokens"] + ours["wrong_summaries"] + ours["errors"], 0)
                # Prompts in one stream are ggml's: more rows than Vanward takes.
                self.assertTrue(ours.embeddings[:4] == stock.embeddings[:4] or not unified)
                self.assertNotEqual(ours.embeddings, stock.embeddings)
                # ggml sums values in float16.
                self.assertLess(difference(ours.embeddings, stock.embeddings), 1e-2)

    def test_a_wrong_option_is_refused_with_words_and_llama_goes_on(self):
        line = self.release.command(DRIVER, self.tiny, "cases", "depth=20", "count=2", "random_text=1")
        done = subprocess.run(line, env=environment({"BUDGET": "a lot"}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('VANWARD_GGML_BUDGET: found "a lot"; expected', done.stderr)

    def test_teacher_forced_text_with_everything_selected_is_stock_or_better(self):
        try:
            model = releases.model()
        except releases.Missing as missing:
            self.skipTest(str(missing))
        arguments = {"depth": 4096, "count": 2000} if LONG else {"depth": 512, "count": 100}
        arguments["text"] = releases.text(BUILD)
        stock = run(self.release, model, None, "score", **arguments)
        ours = run(self.release, model, {"DENSE_BELOW": 0, "BUDGET": "100%"}, "score", **arguments)
        # ggml rounds activations to eight bits, which turns the last bit of a sum into .1 of a logit: stock with and without flash
        # attention have 96 of 100 top tokens in common. What has to be equal is a top token that leads by more.
        equal, clear = ours.equal_tops(stock)
        print(f"{self.release.name}: loss {stock.loss:.4f} stock, {ours.loss:.4f} here; top token equal {100 * equal:.1f} %, "
              f"{100 * clear:.1f} % of those that lead by .3")
        self.assertEqual(ours["sparse"], 30 * arguments["count"])
        self.assertLess(ours.loss, stock.loss + (0.002 if LONG else 0.02))
        self.assertGreaterEqual(clear, 0.99)


    def test_a_passkey_is_found_wherever_stock_finds_it(self):
        try:
            model = releases.model()
        except releases.Missing as missing:
            self.skipTest(str(missing))
        # The prompt is ggml's (one row a step is ours), so that all variants begin with the same cache. The question is decoded token by token, as the
        # answer is.
        repetitions, places = (165, quality.PLACES) if LONG else (20, [0.5])
        for place, key, text in quality.passkeys(repetitions, places):
            path = BUILD / f"passkey-{os.getpid()}.txt"
            path.write_text(text)
            for method in ["minmax", "axis"] if LONG else ["minmax"]:
                # Each graph is built anew, since llama.cpp keeps one with the devices that were chosen for it. The last blocks alone do not have
                # the key: what finds it is selection.
                out = run(self.release, model, {"DENSE_BELOW": 0, "ROWS": 1, "METHOD": method}, "compare", {"LLAMA_GRAPH_REUSE_DISABLE": "1"},
                          text=path, depth=-quality.ASKED,
                          variants="stock/ENABLED=0,half/BUDGET=50%,quarter/BUDGET=25%,last/BUDGET=16")
                found = {name: digits == len(key) for name, digits in out.digits_found(key).items()}
                print(f"{self.release.name}: passkey behind {100 * place:.0f} % of {repetitions} repetitions: {method} {found}")
                self.assertEqual(out["sparse"], 3 * quality.ASKED * 30)
                self.assertFalse(found["last"])
                if found["stock"]:
                    # MINMAX over a quarter of 4,000 tokens misses one digit of the first key: its bounds of repeated text are close to the key's.
                    self.assertTrue(found["half"], f"{method}, behind {100 * place:.0f} %")
                    self.assertTrue(found["quarter"] or method == "minmax", f"{method}, behind {100 * place:.0f} %")
            path.unlink()


class OnEmulatedGpu(WithRelease):
    """A wrapper of ggml's CPU device, whose attention runs on the emulated GPU of tests/emulator."""

    COMMON = {"DEVICES": "CPU", "DENSE_BELOW": 0, "CHECK": 1, "BLOCK": 16}
    GROWTH = 150
    SUMMARISED_APART = 1  # for all layers
    SHARES_THREADS = True  # a GPU has no need of them

    def random_operations(self, model, options, operations, seed):
        super().random_operations(model, {**self.COMMON, **options}, operations, seed)

    def test_random_operations_leave_no_wrong_summary_and_show_no_wrong_token(self):
        for seed in range(4 if LONG else 1):
            self.random_operations(self.tiny, {"METHOD": "minmax"}, 2500 if LONG else 300, 100 + seed)

    def test_random_operations_with_axis_and_blocks_of_32_tokens(self):
        # With 64 channels summaries are in INT4, with 32 in 16 bits.
        for head_dim, operations in [(32, 100), (64, 150)]:
            self.random_operations(releases.tiny(BUILD, head_dim=head_dim), {"METHOD": "axis", "BLOCK": 32, "BUDGET": 64}, 1000 if LONG else operations, 200)

    def test_random_operations_with_sliding_windows_and_soft_caps(self):
        self.random_operations(self.windows, {}, 1000 if LONG else 200, 300)

    def test_random_operations_with_sliding_windows_and_sinks(self):
        self.random_operations(self.sinks, {}, 1000 if LONG else 250, 500)

    def cases(self, model, options, **arguments):
        options = options and {**self.COMMON, **options}
        return run(self.release, model, options, "cases", **{"depth": 300, "count": 3, "context": 2048, "random_text": 1, **arguments})

    def test_everything_selected_gives_stock_results_in_every_kind_of_cache(self):
        for model in [self.tiny, self.windows, self.sinks]:
            for kind in [{"sequences": 1}, {"sequences": 4, "unified": 0}, {"sequences": 4, "unified": 1}, {"sequences": 1, "type": 30}]:
                with self.subTest(model=model.name, **kind):
                    stock = self.cases(model, None, **kind)
                    dense = self.cases(model, {"STRATEGY": "dense"}, **kind)
                    every = self.cases(model, {"BUDGET": "100%"}, **kind)
                    self.assertGreater(dense["dense"], 0)
                    self.assertGreater(every["sparse"], 0)
                    for ours in [dense, every]:
                        self.assertEqual(ours["wrong_outputs"] + ours["wrong_tokens"] + ours["wrong_summaries"] + ours["errors"], 0)
                        # Queries are rounded to the type of the cache.
                        self.assertLess(abs(float(ours.sum) / float(stock.sum) - 1), 2e-2 if kind.get("type") == 30 else 5e-3)

    def test_what_is_not_taken_has_the_bits_of_stock(self):
        for name, kind, options in [
            ("quantised cache", {"type": 8, "flash": 1}, {}),
            ("no flash attention", {"flash": 0}, {}),
            ("below the threshold", {}, {"DENSE_BELOW": 4096}),
            ("more rows than taken", {"sequences": 4}, {"ROWS": 3}),
            ("switched off", {}, {"ENABLED": 0}),
        ]:
            with self.subTest(name):
                stock = self.cases(self.tiny, None, **kind)
                ours = self.cases(self.tiny, options, **kind)
                self.assertEqual(ours.sum, stock.sum)
                self.assertEqual(ours["sparse"] + ours["dense"] + ours["errors"], 0)

    def test_without_a_driver_everything_is_left_to_ggml(self):
        line = self.release.command(DRIVER, self.tiny, "cases", "depth=100", "count=2", "random_text=1")
        done = subprocess.run(line, env={**environment(self.COMMON), "LD_LIBRARY_PATH": "", "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("vanward: VANWARD0 is left to ggml: ", done.stderr)
        self.assertEqual(Output(done.stdout).sum, self.cases(self.tiny, None, depth=100, count=2, context=0).sum)

    def test_steps_whose_calls_of_the_driver_fail_are_left_to_ggml(self):
        # Which call of a function fails, or from which on all do; by these numbers each place of a step is reached. Where nothing is left to Vanward,
        # results have stock's bits. A step fails where the end of what it enqueued cannot be waited for, and succeeds when it is tried again.
        failures = {
            "cuModuleLoadDataEx": ["1+"],
            "cuStreamCreate": ["1"],
            "cuMemAlloc_v2": ["1"],
            "cuMemHostAlloc": ["1"],
            "cuEventCreate": ["1"],
            "cuMemHostRegister_v2": ["1", "12", "10+"] if LONG else ["10+"],
            "cuMemcpyHtoDAsync_v2": ["1+", *map(str, range(1, 20))] if LONG else ["1+", "6", "7"],
            "cuMemcpyDtoHAsync_v2": ["1", "2", "3", "2+"] if LONG else ["1", "3"],
            "cuLaunchKernelEx": ["1+", *map(str, range(1, 40, 2)), "20+"] if LONG else ["1+", "2", "20+"],
            "cuStreamSynchronize": ["1", "3", "3+", "20+", "40+"] if LONG else ["1", "20+"],
        }
        arguments = {"depth": 60, "count": 6, "context": 1024, "sequences": 3, "unified": 1}
        stock = self.cases(self.tiny, None, **arguments)
        for function, calls in failures.items():
            # Checks copy and wait, too, and would be what these fail.
            check = 0 if function in ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"] else 1
            for call in calls:
                with self.subTest(f"{function}:{call}"):
                    ours = run(self.release, self.tiny, {**self.COMMON, "BUDGET": "100%", "CHECK": check}, "cases", {"VANWARD_EMULATOR_FAIL": f"{function}:{call}"},
                               random_text=1, retries=1, **arguments)
                    self.assertEqual(ours["wrong_outputs"] + ours["wrong_tokens"] + ours["wrong_summaries"], 0)
                    self.assertGreater(ours["errors"] + (ours["eager"] == 0), 0)
                    self.assertTrue("retried" not in ours.text or function == "cuStreamSynchronize")
                    self.assertLess(abs(float(ours.sum) / float(stock.sum) - 1), 5e-3)
                    if ours["sparse"] == 0:
                        self.assertEqual(ours.sum, stock.sum)

    def test_sequences_that_are_all_short_are_left_to_ggml(self):
        def compare(count):
            return run(self.release, self.tiny, self.COMMON, "compare", sequences=2, unified=1, depth=240, count=count, random_text=1, flash=1,
                       variants="stock/ENABLED=0,short/DENSE_BELOW=300")

        # Neither has 300 tokens, though the cache has.
        out = compare(14)
        self.assertEqual(re.findall(r"compare (\w+) .* logits_differ (\d+)", out.text), [("stock", "0"), ("short", "0")])
        self.assertEqual(out["dense"] + out["sparse"] + out["passed"], 0)
        self.assertGreater(out["declined_short"], 0)
        # Both have in the end.
        out = compare(100)
        self.assertGreater(out["declined_short"], 0)
        self.assertGreater(out["sparse"], 0)
        self.assertEqual(out["wrong_outputs"] + out["wrong_tokens"] + out["wrong_summaries"] + out["errors"] + out["passed"], 0)

    def test_steps_of_two_sequences_have_the_same_bits_again(self):
        # Where the host computes, no step is captured: this is for the command that a GPU's machine is asked with.
        out = run(self.release, self.tiny, {**self.COMMON, "CHECK": 0}, "compare", depth=240, count=24, sequences=2, random_text=1,
                  variants="off/GRAPHS=off,on/GRAPHS=on")
        found = re.findall(r"compare (\w+) depth 240 steps 24 sequences 2 logits_differ (\d+)", out.text)
        self.assertEqual(found, [("off", "0"), ("on", "0")])
        self.assertGreater(out["sparse"], 0)
        self.assertEqual(out["captured"] + out["updated"] + out["replayed"] + out["errors"], 0)
        self.assertEqual(out["eager"], 48)

    def test_selection_beside_keys_and_values_gives_the_same_bits(self):
        # Two of the 24 steps after 240 tokens begin a block, those to token 240 and 256; all others are late, in each of four layers. With 64 channels summaries are in INT4.
        for model, options in [(self.tiny, {}), (self.tiny, {"METHOD": "minmax"}), (releases.tiny(BUILD, head_dim=64), {})]:
            out = run(self.release, model, {**self.COMMON, **options, "CHECK": 0}, "compare", depth=240, count=24, sequences=2, random_text=1,
                      variants="behind/BESIDE=off,beside/BESIDE=on")
            found = re.findall(r"compare (\w+) depth 240 steps 24 sequences 2 logits_differ (\d+)", out.text)
            self.assertEqual(found, [("behind", "0"), ("beside", "0")])
            self.assertEqual(re.findall(r" selected_beside=(\d+)", out.text), [str(22 * 4)])  # after the second variant
            self.assertEqual(out["errors"], 0)

    def test_keys_have_the_same_prints_however_they_are_read(self):
        # The first step reads 14 keys of two sequences by a kernel of ggml's; after the second variant's tokens were taken back, seven of each are copied one by one.
        for element in [1, 30]:
            out = run(self.release, self.tiny, {**self.COMMON, "CHECK": 0}, "compare", depth=100, count=3, sequences=2, random_text=1, type=element,
                      variants="first/BESIDE=on,again/BESIDE=on")
            self.assertEqual(re.findall(r" logits_differ (\d+)", out.text), ["0", "0"])
            self.assertEqual(out["stale"] + out["errors"], 0)

    def test_nodes_of_a_graph_that_is_used_again_are_looked_at_once(self):
        arguments = {"depth": 100, "count": 12, "sequences": 2, "random_text": 1}
        out = run(self.release, self.tiny, {**self.COMMON, "CHECK": 0}, "compare", variants="taken/BESIDE=on", **arguments)
        self.assertEqual((out["sparse"], out["eager"]), (4 * 12, 12))
        self.assertLess(out["looked_through"], 6)  # two prompts, and the steps' graph
        # Options that decide what is taken are looked at anew.
        out = run(self.release, self.tiny, {**self.COMMON, "CHECK": 0}, "compare",
                  variants="taken/BESIDE=on,rows/ROWS=1,again/BESIDE=on,short/DENSE_BELOW=4000,third/BESIDE=on,off/ENABLED=0", **arguments)
        taken = [each.get("sparse", 0) + each.get("dense", 0) for each in out.all_counters]
        self.assertEqual(taken, [4 * 12, 4 * 12, 8 * 12, 8 * 12, 12 * 12, 12 * 12])

    def test_free_memory_leaves_room_for_summaries(self):
        # Summaries by AXIS are in INT4 where heads have a multiple of 64 channels, and 16 bits otherwise. Before there is a context they may be either.
        for head_dim, options, shares in [
            (32, {}, [16 / 17, 16 / 17]),
            (64, {}, [16 / 17, 48 / 49]),
            (64, {"METHOD": "minmax"}, [16 / 17, 16 / 17]),
            (32, {"STRATEGY": "dense"}, [1, 1]),
            (32, {"ENABLED": 0}, [1, 1]),
        ]:
            out = run(self.release, releases.tiny(BUILD, head_dim=head_dim), {**self.COMMON, **options}, "memory", context=512)
            found = [tuple(map(int, numbers)) for numbers in re.findall(r"memory \w+ (\d+) (\d+)", out.text)]
            self.assertEqual(len(found), 4)
            for (inner, inner_total), (ours, total), share in zip(found[::2], found[1::2], shares):
                self.assertEqual(total, inner_total)
                self.assertAlmostEqual(ours / inner, share, delta=0.015, msg=f"{head_dim} {options}")  # the machine's memory is in use meanwhile

    def test_it_loads_the_wrapped_backend_by_its_path(self):
        backend = sorted(pathlib.Path(self.release.backends).glob("libggml-cpu*x64.so"))[0]
        ours = self.cases(self.tiny, {"BACKEND": backend})
        self.assertGreater(ours["sparse"], 0)
        self.assertEqual(ours["wrong_outputs"] + ours["wrong_tokens"] + ours["wrong_summaries"] + ours["errors"], 0)

    # What the GPU has no part in.
    test_random_operations_around_the_threshold = None
    test_random_operations_on_two_threads = None
    test_several_threads_are_used_where_they_are_shared = None
    test_new_caches_and_models_that_select_by_themselves_are_left_to_ggml = None
    test_a_wrong_option_is_refused_with_words_and_llama_goes_on = None
    test_teacher_forced_text_with_everything_selected_is_stock_or_better = None
    test_a_passkey_is_found_wherever_stock_finds_it = None


class Apart:
    """A wrapper of the device of tests/apart.cpp, to which inputs are copied as to a GPU."""

    @classmethod
    def setUpClass(cls):
        cls.release = fetched(cls)
        cls.tiny = releases.tiny(BUILD)
        cls.options = {"DEVICES": "APART0", "BACKEND": BUILD / f"libllama-apart-api{cls.API}.so", "DENSE_BELOW": 0, "CHECK": 1}

    def assert_nothing_is_wrong(self, out):
        for wrong in ["wrong_inputs", "wrong_summaries", "wrong_tokens", "wrong_outputs", "errors", "passed"]:
            self.assertEqual(out[wrong], 0, wrong)

    def test_what_the_host_wrote_is_known_and_read_back_once(self):
        # The mask and the numbers of rows of each step, but in the first one the mask alone: there is no sequence yet that a write would change.
        out = run(self.release, self.tiny, self.options, "cases", depth=300, count=20, context=1024, sequences=2, unified=1, random_text=1)
        self.assert_nothing_is_wrong(out)
        self.assertEqual(out["eager"], 20)
        self.assertEqual(out["read_inputs"], 2)
        self.assertEqual(out["kept_inputs"], 2 * 20 - 1 - 2)

    def test_inputs_of_two_devices_are_known_to_each(self):
        out = run(self.release, self.tiny, {**self.options, "DEVICES": "APART*"}, "cases", depth=300, count=20, context=1024, sequences=2, unified=1, random_text=1)
        self.assert_nothing_is_wrong(out)
        self.assertEqual(out["eager"], 2 * 20)
        self.assertEqual(out["read_inputs"], 2 * 2)
        self.assertEqual(out["kept_inputs"], 2 * (2 * 20 - 1 - 2))

    def test_what_else_writes_over_an_input_is_noticed(self):
        out = run(self.release, "no model", {**self.options, "BLOCK": 16}, "inputs")
        self.assert_nothing_is_wrong(out)
        self.assertEqual(out["eager"], out["checked"])

    def test_order_and_streams_that_the_backend_plans_for_whole_graphs_stay_out_of_their_parts(self):
        # tests/apart.cpp plans as ggml-cuda with GGML_CUDA_GRAPH_OPT=1, and refuses graphs that do not suit what it planned. With ENABLED=0 graphs are whole.
        for options, is_taken in [({}, True), ({"ENABLED": 0}, False)]:
            out = run(self.release, self.tiny, {**self.options, **options}, "cases", depth=60, count=3, context=1024, random_text=1)
            self.assertEqual((out["sparse"], out["eager"]), (4 * 3, 3) if is_taken else (0, 0))
            self.assert_nothing_is_wrong(out)

    def test_random_operations_find_no_input_that_is_stale(self):
        # With sliding windows there are two masks.
        for model, operations in [(self.tiny, 100), (releases.tiny(BUILD, "gemma2"), 100)]:
            out = run(self.release, model, self.options, "random", operations=operations * (10 if LONG else 1), seed=700)
            print(f"{self.release.name}, inputs apart, {model.name}: {out.counters}")
            self.assert_nothing_is_wrong(out)
            self.assertGreater(out["sparse"], 0)
            self.assertGreater(out["stale"], 0)
            self.assertGreater(out["kept_inputs"], 20 * out["read_inputs"])

    def test_everything_selected_gives_stock_results(self):
        arguments = {"depth": 300, "count": 3, "context": 2048, "random_text": 1, "sequences": 4}
        for unified in [0, 1]:
            stock = run(self.release, self.tiny, None, "cases", unified=unified, **arguments)
            ours = run(self.release, self.tiny, {**self.options, "BUDGET": "100%"}, "cases", unified=unified, **arguments)
            self.assert_nothing_is_wrong(ours)
            self.assertGreater(ours["sparse"], 0)
            # ggml sums values in float16.
            self.assertLess(abs(float(ours.sum) / float(stock.sum) - 1), 5e-3)

    def test_a_step_whose_inputs_cannot_be_read_back_is_left_to_ggml(self):
        out = run(self.release, self.tiny, {**self.options, "CHECK": 0}, "cases", {"VANWARD_EMULATOR_FAIL": "cuMemcpyDtoHAsync_v2:1"}, depth=60, count=6,
                  context=1024, random_text=1)
        self.assertEqual(out["errors"], 1)
        self.assertGreater(out["sparse"], 0)


class NpmApart(Apart, unittest.TestCase):
    fetch = staticmethod(releases.npm)
    API = 2


class DebianApart(Apart, unittest.TestCase):
    fetch = staticmethod(releases.debian)
    API = 3


class Npm(WithRelease, unittest.TestCase):
    fetch = staticmethod(releases.npm)
    SHARES_THREADS = False


class Debian(WithRelease, unittest.TestCase):
    fetch = staticmethod(releases.debian)
    SHARES_THREADS = True


class NpmOnEmulatedGpu(OnEmulatedGpu, unittest.TestCase):
    fetch = staticmethod(releases.npm)


class DebianOnEmulatedGpu(OnEmulatedGpu, unittest.TestCase):
    fetch = staticmethod(releases.debian)


class Losses(unittest.TestCase):
    """gpu/losses.py, which a GPU's machine is asked with, by a wrapper of the CPU's device."""

    @classmethod
    def setUpClass(cls):
        try:
            cls.release, cls.model = releases.npm(), releases.model()
        except releases.Missing as missing:
            raise unittest.SkipTest(str(missing)) from missing
        cls.text = releases.text(BUILD)

    def play(self, part, options, command, arguments):
        device = [] if options is None else ["device=VANWARD0"]
        line = self.release.command(DRIVER, self.model, command, *device, "ubatch=512", *(f"{name}={value}" for name, value in arguments.items()),
                                    beside=EMULATOR)
        settings = environment(None if options is None else {"DEVICES": "CPU", "DENSE_BELOW": 0, **options})
        return subprocess.run(line, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3000).stdout

    def losses(self, play, kinds):
        log = io.StringIO()
        is_well = losses.losses(play, self.text, 100, 2, log, at_once=2, kinds=kinds, shares=[50])
        return is_well, [json.loads(line) for line in log.getvalue().splitlines()]

    def test_losses_are_those_of_attentions_that_were_counted(self):
        is_well, (stock, dense, *sparse) = self.losses(self.play, [("axis", 16), ("minmax", 16)])
        self.assertTrue(is_well)
        self.assertEqual(dense["counters"]["dense"], 30 * 2)
        for each in sparse:
            self.assertEqual(each["counters"]["sparse"], 30 * 2)
        for each in [dense, *sparse]:
            self.assertNotEqual(each["loss"], stock["loss"])
            self.assertLess(abs(each["loss"] / stock["loss"] - 1), 0.1)

    def test_losses_of_steps_that_were_left_to_ggml_are_not_well(self):
        def unasked(part, options, command, arguments):
            return self.play(part, None if options is None else {**options, **left}, command, arguments)

        for left in [{"ENABLED": 0}, {"DENSE_BELOW": 101}]:
            self.assertFalse(self.losses(unasked, [("axis", 16)])[0], left)

    @unittest.skipUnless(LONG, "make test-llama runs it")
    def test_digits_of_passkeys_are_those_of_attentions_that_were_counted(self):
        log = io.StringIO()
        self.assertTrue(losses.passkeys(self.play, BUILD, log, at_once=2, kinds=[("axis", 16)], repetitions=4, places=[0.5]))
        digits = {each["passkeys"]: each["digits"] for each in map(json.loads, log.getvalue().splitlines())}
        self.assertEqual(len(digits), 4)


class Graphs(unittest.TestCase):
    def play(self, part):
        done = subprocess.run([BUILD / "llama-graphs", part], env=environment({"DEVICES": "CPU"}), stdout=subprocess.PIPE, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_what_changes_a_step_is_noticed_and_equal_steps_are_replayed(self):
        self.play("decisions")

    def test_queries_are_ready_behind_the_last_node_that_writes_them(self):
        self.play("queries")

    def test_captures_are_updated_launched_and_given_up(self):
        self.play("captures")


class Writes(unittest.TestCase):
    def test_what_is_written_outside_of_graphs_is_no_longer_summarised(self):
        done = subprocess.run([BUILD / "llama-writes"], stdout=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)


class Inputs(unittest.TestCase):
    def play(self, part):
        done = subprocess.run([BUILD / "llama-inputs", part], stdout=subprocess.PIPE, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_what_the_host_wrote_is_known_until_something_else_may_be_there(self):
        self.play("known")

    def test_masks_are_followed_by_what_changed_in_them(self):
        self.play("masks")

    def test_sets_of_cells_are_compared_as_by_single_cells(self):
        self.play("sets")


class Picture(unittest.TestCase):
    def test_the_picture_in_the_readme_shows_the_figures_of_the_pages(self):
        done = subprocess.run([sys.executable, releases.ROOT / "benches/llama_plot.py", "--check"], stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)


class Loading(unittest.TestCase):
    def load(self, version):
        done = subprocess.run([BUILD / "llama-refusals", LIBRARY, str(version)], stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout

    def test_backend_api_2_and_3_are_served(self):
        for version in [2, 3]:
            self.assertEqual(self.load(version), (0, ""))

    def test_another_backend_api_is_refused_with_words(self):
        for version in [1, 4, 6]:
            status, text = self.load(version)
            self.assertEqual(status, 1)
            self.assertEqual(text, f"vanward: ggml 0.99.0 has backend API version {version}; this library knows 2 and 3\n")

    def test_it_exports_its_entries_and_nothing_else(self):
        names = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], stdout=subprocess.PIPE, text=True, check=True).stdout
        exported = {line.split()[-1] for line in names.splitlines()}
        self.assertEqual(exported, {"ggml_backend_init", "vanward_ggml_counter", "vanward_ggml_forget_summaries"})


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
