"""A few steps of train.py on random activations: the loss falls, the library loads the files, and what their lists cover is printed.

    python -m unittest discover -s examples/forecast -v

Needs torch and safetensors; without them the test is skipped.
"""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import sys
import tempfile
import unittest
from unittest import mock

MISSING = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
TOKENS, PIECES, STEPS = 1536, 2, 40
LAYERS, HIDDEN, HEADS, KV_HEADS = 3, 128, 4, 2  # heads of 32 channels


@unittest.skipIf(MISSING, f"not installed: {', '.join(MISSING)}")
class Training(unittest.TestCase):
    def write_activations(self, folder, model, tokens):
        """Random ones, whose queries follow from what enters the layer before, where --keep finds those of these tokens."""
        import hashlib

        import torch
        from safetensors.torch import save_file

        x = torch.randn(len(tokens), HIDDEN)
        tensors = {}
        for i in range(LAYERS):
            tensors[f"{i}.x"] = x
            tensors[f"{i}.q"] = 3 * torch.tanh(x @ self.maps[i]).view(-1, HEADS, model.dim)
            # Windows differ in their means, or no selection would be better than another.
            blocks = torch.randn(len(tokens) // 32, KV_HEADS, model.dim).repeat_interleave(32, 0)
            tensors[f"{i}.keys"] = torch.randn(len(tokens), KV_HEADS, model.dim) + blocks
            x = 0.95 * x + 0.3 * torch.randn(len(tokens), HIDDEN)
        save_file(tensors, folder / f"{hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]}.safetensors", metadata={"loss": "1.0"})

    def test_a_few_steps_lower_the_loss_and_write_files_that_the_library_loads(self):
        import torch

        sys.path.insert(0, str(pathlib.Path(__file__).parent))
        import train
        from model import Shape

        torch.manual_seed(1)
        self.maps = torch.randn(LAYERS, HIDDEN, HIDDEN) * HIDDEN**-0.5
        model = Shape(LAYERS, HIDDEN, HEADS, KV_HEADS, 10000.0)
        model.tokens = lambda text: torch.tensor([ord(letter) for letter in text])
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            texts = {"learn": "a" * TOKENS + "b" * TOKENS, "compare": "c" * TOKENS}
            for file, text in texts.items():
                (folder / file).write_text(text)
                for piece in model.tokens(text).split(TOKENS):
                    self.write_activations(folder, model, piece)
            arguments = ["train.py", "none", "--out", name, "--keep", name, "--train", str(folder / "learn"), "--test", str(folder / "compare"), "--tokens",
                         str(TOKENS), "--pieces", str(PIECES), "--steps", str(STEPS), "--rows", "64", "--rate", "0.02"]
            printed = io.StringIO()
            with mock.patch.object(train, "Llama", lambda path: model), mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(printed):
                train.main()
            self.check(printed.getvalue(), folder, train)

    def check(self, printed, folder, train):
        losses = re.search(r"training; loss ([\d.]+) to ([\d.]+), with memory ([\d.]+) to ([\d.]+)", printed)
        self.assertIsNotNone(losses, printed)
        first, last, first_memory, last_memory = map(float, losses.groups())
        self.assertLess(last, 0.98 * first)
        self.assertLess(last_memory, 0.98 * first_memory)

        with train.vanward.Session("cpu") as session:
            for name, heads, memory in (("closed", HEADS, False), ("trained", KV_HEADS, False), ("trained-memory", KV_HEADS, True)):
                info = train.Forecast.load(session, folder / f"{name}.safetensors").info()
                self.assertEqual((info.layers, info.input_dim, info.q_heads, bool(info.memory)), (LAYERS - 1, HIDDEN, heads, memory))
        start, trained = (train.load_file(folder / f"{name}.safetensors")["layer.0.weight"] for name in ("vector", "trained"))
        self.assertGreater((start - trained).abs().max().item(), 0)

        # Both tables have a row for each layer that is forecast, and their mean.
        heads = re.findall(r"^\| layer \| (.*) \|$", printed, re.M)
        self.assertEqual([head.split(" | ")[:3] for head in heads], [["own queries", "own sum", "closed"]] * 2)
        means = [list(map(float, row.split(" | "))) for row in re.findall(r"^\| mean \| (.*) \|$", printed, re.M)]
        self.assertEqual(len(re.findall(r"^\| [12] \| ", printed, re.M)), 2 * (LAYERS - 1))
        for row in means:
            own, chance = row[0], train.LISTED / (TOKENS / train.BLOCK)
            self.assertTrue(all(0 < share <= 1 for share in row), row)
            self.assertGreater(own, chance)
            found = dict(zip(heads[0].split(" | "), row))
            for more in ("", "-memory"):
                self.assertGreater(found["trained" + more], found["vector" + more] - 0.01)
        closed = dict(zip(heads[0].split(" | "), means[0]))["closed"]
        self.assertGreater(closed, 0.8)  # queries follow from the inputs but for what tanh bends and the stream receives on its way


if __name__ == "__main__":
    os.environ.setdefault("VANWARD_CHECK", "1")
    unittest.main()
