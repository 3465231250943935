"""Writes steps of a text through a few layers of a model, and a forecast of their queries that never saw it, for benches/gpu/forecast.py.

    python examples/forecast/export.py MODEL.gguf [--out FOLDER] [--layers N ...] [--train FILE ...] [--test FILE ...] [--pieces N] [--tokens N] [--rows N]

Activations are computed in torch (model.py). Two files of the safetensors format are written to FOLDER:

    closed.safetensors   map n forecasts the queries of the n-th layer of --layers from what enters the layer before it; fitted by
                         vwd_forecast_accumulate and _solve over the texts to learn from, and loadable by vwd_forecast_load
    steps.safetensors    of the test text, in float16, {n}.keys and {n}.values [tokens, KV heads, D], keys after the rotary embedding, and of its last
                         --rows positions {n}.x [rows, hidden], what enters the layer before, and {n}.q [rows, query heads, D], before the embedding
"""

import argparse
import pathlib

import torch
from safetensors.torch import save_file
from train import RIDGE, ROOT, Forecast, activations, text_of, vanward

from model import Llama


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", default="steps", help="folder for the files")
    parser.add_argument("--keep", help="folder for activations, as train.py has it")
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 10, 16, 22, 28], help="layers whose queries are forecast")
    parser.add_argument("--train", nargs="+", default=sorted((ROOT / "docs").glob("*.md")), help="texts to learn from")
    parser.add_argument("--test", nargs="+", default=[ROOT / "THIRD-PARTY"], help="text whose steps are written")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a piece of text")
    parser.add_argument("--pieces", type=int, default=4, help="pieces of the training text")
    parser.add_argument("--rows", type=int, default=256, help="last positions of the test text whose steps are written")
    o = parser.parse_args()
    model = Llama(o.model)
    train_tokens, test_tokens = (model.tokens(text_of(files)) for files in (o.train, o.test))
    if len(train_tokens) < o.tokens * o.pieces or len(test_tokens) < o.tokens:
        parser.error(f"{len(train_tokens)} tokens to learn from and {len(test_tokens)} to write; expected {o.tokens * o.pieces} and {o.tokens}")
    if min(o.layers) < 1 or max(o.layers) >= model.layers:
        parser.error(f"layers {o.layers}; expected some of 1 … {model.layers - 1}")
    out = pathlib.Path(o.out)
    out.mkdir(parents=True, exist_ok=True)
    with vanward.Session("cpu") as session, Forecast(session, layers=len(o.layers), input_dim=model.hidden, q_heads=model.heads, head_dim=model.dim,
                                                     ridge=RIDGE) as forecast:
        for piece in train_tokens.split(o.tokens)[: o.pieces]:
            layers, loss = activations(model, piece, o.keep)
            for n, layer in enumerate(o.layers):
                forecast.accumulate(layer=n, x=layers[layer - 1].x, q=layers[layer].q.contiguous())
            print(f"activations of {len(piece)} tokens; loss of the last 256: {loss:.3f}", flush=True)
        forecast.solve()
        forecast.save(out / "closed.safetensors")
    layers, loss = model.run(test_tokens[: o.tokens])
    print(f"activations of the test text; loss {loss:.3f}", flush=True)
    steps = {}
    for n, layer in enumerate(o.layers):
        here, before = layers[layer], layers[layer - 1]
        parts = dict(keys=here.keys, values=here.values, x=before.x[-o.rows :], q=here.q[-o.rows :])
        for name, tensor in parts.items():
            narrow = tensor.half().contiguous()
            assert narrow.isfinite().all(), f"layer {layer}: {name} has no place in float16"
            steps[f"{n}.{name}"] = narrow
    save_file(steps, out / "steps.safetensors", metadata={
        "layers": " ".join(map(str, o.layers)), "theta": str(model.theta), "hidden": str(model.hidden), "loss": str(loss)})


if __name__ == "__main__":
    with torch.no_grad():
        main()
