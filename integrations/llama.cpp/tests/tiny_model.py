#!/usr/bin/env python3
"""Writes a small model with random weights as GGUF: `tiny_model.py FILE [ARCHITECTURE] [CHANNELS OF A HEAD] [SEED] [WEIGHTS]`.

llama      grouped query heads, the default
gemma2     a sliding window in every second layer, and soft caps
gpt-oss    such windows, and sinks
bert       an encoder: no KV cache, and every token sees every other one
t5         an encoder and a decoder that attends to what it encoded, with biases of relative positions
bloom      ALiBi, a bias of each head for the distance of tokens
deepseek2  MLA: values are the first channels of the keys

WEIGHTS are f32, or q4_0, of which ggml-cuda has fewer kernels to compile.

Layers, heads and channels are few, so that a test decodes thousands of tokens a second, and grouped as in real models.
"""

import array
import math
import random
import struct
import sys

LAYERS, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY, CONTEXT, WINDOW, EXPERTS, BUCKETS = 4, 6, 2, 128, 96, 4096, 64, 2, 32
LATENT, ROTATED = 48, 16  # channels of MLA's keys: those that values share, and those that are rotated
U32, F32, BOOL, STRING = 4, 6, 7, 8  # types of metadata


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def metadata(name, kind, value):
    packed = string(value) if kind == STRING else struct.pack({U32: "<I", F32: "<f", BOOL: "<?"}[kind], value)
    return string(name) + struct.pack("<I", kind) + packed


def with_bias(name, shape):
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


def bert_shapes(head_dim):
    embedding = HEADS * head_dim
    square = (embedding, embedding)
    yield "token_embd.weight", (embedding, VOCABULARY)
    yield "token_types.weight", (embedding, 2)
    yield "position_embd.weight", (embedding, CONTEXT)
    yield from with_bias("token_embd_norm", (embedding,))
    for i in range(LAYERS):
        for part in ["attn_q", "attn_k", "attn_v", "attn_output"]:
            yield from with_bias(f"blk.{i}.{part}", square)
        yield from with_bias(f"blk.{i}.attn_output_norm", (embedding,))
        yield from with_bias(f"blk.{i}.ffn_up", (embedding, FEED_FORWARD))
        yield from with_bias(f"blk.{i}.ffn_down", (FEED_FORWARD, embedding))
        yield from with_bias(f"blk.{i}.layer_output_norm", (embedding,))


def t5_shapes(head_dim):
    embedding = HEADS * head_dim
    yield "token_embd.weight", (embedding, VOCABULARY)
    for side in ["enc", "dec"]:
        yield f"{side}.output_norm.weight", (embedding,)
        for i in range(LAYERS):
            for attention in ["attn", "cross_attn"][: 1 if side == "enc" else 2]:
                yield f"{side}.blk.{i}.{attention}_norm.weight", (embedding,)
                for part in "qkvo":
                    yield f"{side}.blk.{i}.{attention}_{part}.weight", (embedding, embedding)
            yield f"{side}.blk.{i}.attn_rel_b.weight", (HEADS, BUCKETS)
            yield f"{side}.blk.{i}.ffn_norm.weight", (embedding,)
            yield f"{side}.blk.{i}.ffn_up.weight", (embedding, FEED_FORWARD)
            yield f"{side}.blk.{i}.ffn_down.weight", (FEED_FORWARD, embedding)


def bloom_shapes(head_dim):
    embedding = HEADS * head_dim
    yield "token_embd.weight", (embedding, VOCABULARY)
    yield from with_bias("token_embd_norm", (embedding,))
    yield from with_bias("output_norm", (embedding,))
    for i in range(LAYERS):
        yield from with_bias(f"blk.{i}.attn_norm", (embedding,))
        yield from with_bias(f"blk.{i}.attn_qkv", (embedding, 3 * embedding))
        yield from with_bias(f"blk.{i}.attn_output", (embedding, embedding))
        yield from with_bias(f"blk.{i}.ffn_norm", (embedding,))
        yield from with_bias(f"blk.{i}.ffn_up", (embedding, FEED_FORWARD))
        yield from with_bias(f"blk.{i}.ffn_down", (FEED_FORWARD, embedding))


def deepseek2_shapes(head_dim):
    embedding = HEADS * head_dim
    yield "token_embd.weight", (embedding, VOCABULARY)
    yield "output_norm.weight", (embedding,)
    yield "output.weight", (embedding, VOCABULARY)
    for i in range(LAYERS):
        yield f"blk.{i}.attn_norm.weight", (embedding,)
        yield f"blk.{i}.attn_q_a.weight", (embedding, LATENT)
        yield f"blk.{i}.attn_q_a_norm.weight", (LATENT,)
        yield f"blk.{i}.attn_q_b.weight", (LATENT, HEADS * head_dim)
        yield f"blk.{i}.attn_kv_a_mqa.weight", (embedding, LATENT + ROTATED)
        yield f"blk.{i}.attn_kv_a_norm.weight", (LATENT,)
        yield f"blk.{i}.attn_k_b.weight", (head_dim - ROTATED, LATENT, HEADS)
        yield f"blk.{i}.attn_v_b.weight", (LATENT, head_dim, HEADS)
        yield f"blk.{i}.attn_output.weight", (HEADS * head_dim, embedding)
        yield f"blk.{i}.ffn_norm.weight", (embedding,)
        yield f"blk.{i}.ffn_gate.weight", (embedding, FEED_FORWARD)
        yield f"blk.{i}.ffn_up.weight", (embedding, FEED_FORWARD)
        yield f"blk.{i}.ffn_down.weight", (FEED_FORWARD, embedding)


def shapes(architecture, head_dim):
    """Names and extents, the contiguous one first."""
    others = {"bert": bert_shapes, "t5": t5_shapes, "bloom": bloom_shapes, "deepseek2": deepseek2_shapes}
    if architecture in others:
        yield from others[architecture](head_dim)
        return
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


def is_quantised(name, shape, weights):
    return weights == "q4_0" and len(shape) > 1 and name.endswith(".weight")


def data_of(name, shape, weights, numbers):
    count, scale = math.prod(shape), 1.6 / shape[0] ** 0.5
    if is_quantised(name, shape, weights):
        # Blocks of 32: a scale, and weights uniform in −8 … 7, which have a deviation of 4.6.
        one = struct.pack("<e", scale / 4.6)
        return b"".join(one + numbers.randbytes(16) for _ in range(count // 32))
    is_scale = "norm" in name and name.endswith(".weight")
    return array.array("f", (1.0 if is_scale else numbers.gauss(0, scale) for _ in range(count))).tobytes()


def main(path, architecture, head_dim, seed, weights):
    numbers = random.Random(seed)
    facts = [
        ("general.architecture", STRING, architecture),
        (f"{architecture}.block_count", U32, LAYERS),
        (f"{architecture}.context_length", U32, CONTEXT),
        (f"{architecture}.embedding_length", U32, HEADS * head_dim),
        (f"{architecture}.feed_forward_length", U32, FEED_FORWARD),
        (f"{architecture}.attention.head_count", U32, HEADS),
        (f"{architecture}.attention.head_count_kv", U32, {"bert": HEADS, "t5": HEADS, "bloom": HEADS, "deepseek2": 1}.get(architecture, KV_HEADS)),
        (f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5),
        (f"{architecture}.attention.layer_norm_epsilon", F32, 1e-5),
        (f"{architecture}.rope.dimension_count", U32, ROTATED if architecture == "deepseek2" else head_dim),
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
    if architecture == "bert":
        facts += [
            ("bert.attention.causal", BOOL, False),
            ("bert.pooling_type", U32, 1),  # the mean
            ("tokenizer.ggml.token_type_count", U32, 2),
        ]
    if architecture == "t5":
        facts += [
            ("t5.attention.relative_buckets_count", U32, BUCKETS),
            ("t5.decoder_start_token_id", U32, 0),
        ]
    if architecture == "deepseek2":
        facts += [
            ("deepseek2.attention.q_lora_rank", U32, LATENT),
            ("deepseek2.attention.kv_lora_rank", U32, LATENT),
            ("deepseek2.attention.key_length", U32, LATENT + ROTATED),
            ("deepseek2.attention.value_length", U32, LATENT),
            ("deepseek2.attention.key_length_mla", U32, head_dim),
            ("deepseek2.attention.value_length_mla", U32, head_dim),
            ("deepseek2.leading_dense_block_count", U32, LAYERS),  # no layer has experts
            ("deepseek2.expert_feed_forward_length", U32, FEED_FORWARD),
            ("deepseek2.expert_shared_count", U32, 1),
            ("deepseek2.expert_weights_scale", F32, 1.0),
        ]
    tensors = list(shapes(architecture, head_dim))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    header += b"".join(metadata(*fact) for fact in facts)
    offset = 0
    for name, shape in tensors:
        header += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        quantised = is_quantised(name, shape, weights)
        header += struct.pack("<IQ", 2 if quantised else 0, offset)
        size = math.prod(shape) // 32 * 18 if quantised else 4 * math.prod(shape)
        offset += (size + 31) // 32 * 32
    with open(path, "wb") as file:
        file.write(header + bytes(-len(header) % 32))
        for name, shape in tensors:
            data = data_of(name, shape, weights, numbers)
            file.write(data + bytes(-len(data) % 32))


if __name__ == "__main__":
    arguments = sys.argv[1:] + ["llama", "32", "1", "f32"][len(sys.argv) - 2 :]
    main(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]), arguments[4])
