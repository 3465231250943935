"""A Llama model from a GGUF file in torch, as far as what a forecast is made of: what enters each layer, its queries and its keys."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Activations:
    """What a layer has for T tokens of a text."""

    x: torch.Tensor  # [T, hidden]: the residual stream that enters the layer
    q: torch.Tensor  # [T, query heads, D]: before the rotary embedding
    keys: torch.Tensor  # [T, KV heads, D]: after it
    values: torch.Tensor | None = None  # [T, KV heads, D]


@dataclass
class Shape:
    """What a forecast has to know of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    theta: float

    @property
    def dim(self):
        return self.hidden // self.heads

    def angles(self, positions):
        """Cosines and sines [T, D/2] of the rotary embedding."""
        turns = positions[:, None].double() * self.theta ** (-torch.arange(0, self.dim, 2).double() / self.dim)
        return turns.cos().float(), turns.sin().float()

    def rotate(self, x, angles):
        """x [T, heads, D] with channels 2c and 2c + 1 turned, as GGUF files of this architecture have them (VWD_ROPE_INTERLEAVED)."""
        cosine, sine = (a[:, None] for a in angles)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1).flatten(-2)


class Llama(Shape):
    def __init__(self, path):
        from gguf import GGUFReader
        from gguf.quants import dequantize
        from tokenizers import Tokenizer, models, pre_tokenizers

        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        number = lambda name: fields[f"llama.{name}"]  # noqa: E731
        sizes = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "rope.freq_base")
        super().__init__(*map(number, sizes))
        self.epsilon = number("attention.layer_norm_rms_epsilon")
        self.weights = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        self.tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(fields["tokenizer.ggml.tokens"])}, merges))
        digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])

    def tokens(self, text):
        return torch.tensor(self.tokenizer.encode(text).ids)

    @torch.no_grad()
    def run(self, tokens):
        """The Activations of each layer, and what the model makes of the text: the mean loss of its next tokens."""
        w, found = self.weights, []
        angles = self.angles(torch.arange(len(tokens)))
        norm = lambda x, name: F.rms_norm(x, (self.hidden,), w[name], self.epsilon)  # noqa: E731
        x = w["token_embd.weight"][tokens]
        for i in range(self.layers):
            of = lambda name: w[f"blk.{i}.{name}.weight"]  # noqa: B023, E731
            normed = norm(x, f"blk.{i}.attn_norm.weight")
            q, k, v = (F.linear(normed, of(f"attn_{name}")).unflatten(-1, (-1, self.dim)) for name in "qkv")
            keys = self.rotate(k, angles)
            found.append(Activations(x, q, keys, v))
            lead = lambda t: t.transpose(0, 1)[None]  # noqa: E731
            out = F.scaled_dot_product_attention(lead(self.rotate(q, angles)), lead(keys), lead(v), is_causal=True, enable_gqa=True)
            x = x + F.linear(out[0].transpose(0, 1).flatten(1), of("attn_output"))
            normed = norm(x, f"blk.{i}.ffn_norm.weight")
            x = x + F.linear(F.silu(F.linear(normed, of("ffn_gate"))) * F.linear(normed, of("ffn_up")), of("ffn_down"))
        last = norm(x[-257:], "output_norm.weight")
        loss = F.cross_entropy(F.linear(last[:-1], w["token_embd.weight"]), tokens[-256:])
        return found, loss.item()
