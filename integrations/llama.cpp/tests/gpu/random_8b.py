#!/usr/bin/env python3
"""Writes a model of the shape of Llama 3 8B with random weights in Q4_0 as GGUF, 4.5 GB: `random_8b.py FILE [LAYERS]`. Needs numpy."""

import pathlib
import struct
import sys

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tiny_model import F32, STRING, U32, metadata, string

ARRAY, I32 = 9, 5  # types of metadata

EMBEDDING, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, CONTEXT = 4096, 14336, 32, 8, 128, 128256, 1 << 18
TYPE_F32, TYPE_Q4_0 = 0, 2
BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: a scale in float16, then 32 weights of four bits


def shapes(layers):
    """Names and extents, the contiguous one first."""
    yield "token_embd.weight", (EMBEDDING, VOCABULARY)
    yield "output_norm.weight", (EMBEDDING,)
    yield "output.weight", (EMBEDDING, VOCABULARY)
    for i in range(layers):
        yield f"blk.{i}.attn_norm.weight", (EMBEDDING,)
        yield f"blk.{i}.attn_q.weight", (EMBEDDING, HEADS * HEAD_DIM)
        yield f"blk.{i}.attn_k.weight", (EMBEDDING, KV_HEADS * HEAD_DIM)
        yield f"blk.{i}.attn_v.weight", (EMBEDDING, KV_HEADS * HEAD_DIM)
        yield f"blk.{i}.attn_output.weight", (HEADS * HEAD_DIM, EMBEDDING)
        yield f"blk.{i}.ffn_norm.weight", (EMBEDDING,)
        yield f"blk.{i}.ffn_gate.weight", (EMBEDDING, FEED_FORWARD)
        yield f"blk.{i}.ffn_up.weight", (EMBEDDING, FEED_FORWARD)
        yield f"blk.{i}.ffn_down.weight", (FEED_FORWARD, EMBEDDING)


def bytes_of(shape):
    elements = int(numpy.prod(shape))
    return 4 * elements if len(shape) == 1 else elements // BLOCK * BLOCK_BYTES


def data_of(shape, numbers):
    if len(shape) == 1:
        return numpy.ones(shape, numpy.float32).tobytes()
    blocks = numpy.frombuffer(bytearray(numbers.bytes(bytes_of(shape))), numpy.uint8).reshape(-1, BLOCK_BYTES)
    # Uniform in −8 … 7 with a deviation of 4.6; the weights' is 1.6 over the root of the number of inputs.
    blocks[:, :2] = numpy.array([1.6 / shape[0] ** 0.5 / 4.6], numpy.float16).view(numpy.uint8)
    return blocks.tobytes()


def array(name, kind, values):
    """Metadata of many values, which are packed."""
    return string(name) + struct.pack("<IIQ", ARRAY, kind, len(values)) + b"".join(values)


def tokenizer():
    """Words without a meaning, so that llama-server can write its answers."""
    unknown, control, byte, normal = 2, 3, 6, 1
    tokens = [("<unk>", unknown), ("<s>", control), ("</s>", control), *((f"<0x{n:02X}>", byte) for n in range(256))]
    tokens += [(f"w{n} ", normal) for n in range(len(tokens), VOCABULARY)]
    yield array("tokenizer.ggml.tokens", STRING, [string(text) for text, _ in tokens])
    yield array("tokenizer.ggml.scores", F32, [struct.pack("<f", 0)] * VOCABULARY)
    yield array("tokenizer.ggml.token_type", I32, [struct.pack("<i", kind) for _, kind in tokens])


def main(path, layers=32):
    facts = [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, layers),
        ("llama.context_length", U32, CONTEXT),
        ("llama.embedding_length", U32, EMBEDDING),
        ("llama.feed_forward_length", U32, FEED_FORWARD),
        ("llama.attention.head_count", U32, HEADS),
        ("llama.attention.head_count_kv", U32, KV_HEADS),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("llama.rope.dimension_count", U32, HEAD_DIM),
        ("llama.rope.freq_base", F32, 500000.0),
        ("llama.vocab_size", U32, VOCABULARY),
        ("general.file_type", U32, 2),
        ("tokenizer.ggml.model", STRING, "llama"),
    ]
    arrays = list(tokenizer())
    tensors = list(shapes(layers))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts) + len(arrays)) + b"".join(metadata(*fact) for fact in facts) + b"".join(arrays)
    offset = 0
    for name, shape in tensors:
        kind = TYPE_F32 if len(shape) == 1 else TYPE_Q4_0
        header += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
        offset += (bytes_of(shape) + 31) // 32 * 32
    numbers = numpy.random.Generator(numpy.random.SFC64(1))
    with open(path, "wb") as file:
        file.write(header + bytes(-len(header) % 32))
        for _, shape in tensors:
            data = data_of(shape, numbers)
            file.write(data + bytes(-len(data) % 32))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
