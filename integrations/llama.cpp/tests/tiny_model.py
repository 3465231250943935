#!/usr/bin/env python3
"""Writes a small model with random weights as GGUF: `tiny_model.py FILE [llama|gemma2|gpt-oss] [CHANNELS OF A HEAD] [SEED]`.

gemma2 has a sliding window in every second layer, and soft caps; gpt-oss has such windows, and sinks.

Layers, heads and channels are few, so that a test decodes thousands of tokens a second, and grouped as in real models.
"""

import array
import math
import random
import struct
import sys

LAYERS, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY, CONTEXT, WINDOW, EXPERTS = 4, 6, 2, 128, 96, 4096, 64, 2
U32, F32, STRING = 4, 6, 8  # types of metadata


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def metadata(name, kind, value):
    packed = string(value) if kind == STRING else struct.pack("<I" if kind == U32 else "<f", value)
    return string(name) + struct.pack("<I", kind) + packed


def shapes(architecture, head_dim):
    """Names and extents, the contiguous one first."""
    embedding = HEADS * head_dim
    yield "token_embd.weight", (embedding, VOCABULARY)
    yield "output_norm.weight", (embedding,)
    if architecture != "gemma2":
        yield "output.weight", (embedding, VOCABULARY)
    for i in range(LAYERS):
        yield f"blk.{i}.attn_norm.weight", (embedding,)
        yield f"blk.{i}.attn_q.weight", (embedding, HEADS * head_dim)
        yield f"blk.{i}.attn_k.weight", (embedding, KV_HEADS * head_dim)
        yield f"blk.{i}.attn_v.weight", (embedding, KV_HEADS * head_dim)
        yield f"blk.{i}.attn_output.weight", (HEADS * head_dim, embedding)
        if architecture == "gpt-oss":
            yield f"blk.{i}.attn_sinks.weight", (HEADS,)
            yield f"blk.{i}.attn_output.bias", (embedding,)
            yield f"blk.{i}.post_attention_norm.weight", (embedding,)
            yield f"blk.{i}.ffn_gate_inp.weight", (embedding, EXPERTS)
            yield f"blk.{i}.ffn_gate_inp.bias", (EXPERTS,)
            for part, shape in [("gate", (embedding, FEED_FORWARD)), ("up", (embedding, FEED_FORWARD)), ("down", (FEED_FORWARD, embedding))]:
                yield f"blk.{i}.ffn_{part}_exps.weight", (*shape, EXPERTS)
                yield f"blk.{i}.ffn_{part}_exps.bias", (shape[1], EXPERTS)
            continue
        yield f"blk.{i}.ffn_norm.weight", (embedding,)
        if architecture == "gemma2":
            yield f"blk.{i}.post_attention_norm.weight", (embedding,)
            yield f"blk.{i}.post_ffw_norm.weight", (embedding,)
        yield f"blk.{i}.ffn_gate.weight", (embedding, FEED_FORWARD)
        yield f"blk.{i}.ffn_up.weight", (embedding, FEED_FORWARD)
        yield f"blk.{i}.ffn_down.weight", (FEED_FORWARD, embedding)


def main(path, architecture, head_dim, seed):
    numbers = random.Random(seed)
    facts = [
        ("general.architecture", STRING, architecture),
        (f"{architecture}.block_count", U32, LAYERS),
        (f"{architecture}.context_length", U32, CONTEXT),
        (f"{architecture}.embedding_length", U32, HEADS * head_dim),
        (f"{architecture}.feed_forward_length", U32, FEED_FORWARD),
        (f"{architecture}.attention.head_count", U32, HEADS),
        (f"{architecture}.attention.head_count_kv", U32, KV_HEADS),
        (f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5),
        (f"{architecture}.rope.dimension_count", U32, head_dim),
        (f"{architecture}.vocab_size", U32, VOCABULARY),
        ("tokenizer.ggml.model", STRING, "no_vocab"),
    ]
    if architecture == "gemma2":
        facts += [
            ("gemma2.attention.key_length", U32, head_dim),
            ("gemma2.attention.value_length", U32, head_dim),
            ("gemma2.attention.sliding_window", U32, WINDOW),
            ("gemma2.attn_logit_softcapping", F32, 5.0),
            ("gemma2.final_logit_softcapping", F32, 30.0),
        ]
    if architecture == "gpt-oss":
        facts += [
            ("gpt-oss.attention.key_length", U32, head_dim),
            ("gpt-oss.attention.value_length", U32, head_dim),
            ("gpt-oss.attention.sliding_window", U32, WINDOW),
            ("gpt-oss.expert_count", U32, EXPERTS),
            ("gpt-oss.expert_used_count", U32, 1),
            ("gpt-oss.expert_feed_forward_length", U32, FEED_FORWARD),
        ]
    tensors = list(shapes(architecture, head_dim))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    header += b"".join(metadata(*fact) for fact in facts)
    offset = 0
    for name, shape in tensors:
        header += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        header += struct.pack("<IQ", 0, offset)  # float32
        count = math.prod(shape)
        offset += (4 * count + 31) // 32 * 32
    with open(path, "wb") as file:
        file.write(header + bytes(-len(header) % 32))
        for name, shape in tensors:
            count = math.prod(shape)
            scale = 1.0 if "norm" in name else 1.6 / shape[0] ** 0.5
            values = (1.0 if "norm" in name else numbers.gauss(0, scale) for _ in range(count))
            data = array.array("f", values).tobytes()
            file.write(data + bytes(-len(data) % 32))


if __name__ == "__main__":
    arguments = sys.argv[1:] + ["llama", "32", "1"][len(sys.argv) - 2 :]
    main(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]))
