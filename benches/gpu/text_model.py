"""Models that self_text.py decodes with: a constructed one that copies from its context, and a Llama from a GGUF file.

A model is the layers of Llama: norm, projections, rotary embedding of channel pairs (2c, 2c + 1), attention, output projection, norm, gated MLP. The
residual stream and the logits are float32, what enters a matrix product and the weights have the model's dtype.
"""

import math
import pathlib
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CONSTANT = 8.0  # channel 0 of every embedding
FIRST = 1.9  # mean square of the residual stream's channels after layer 0, of random weights
WRITTEN = 3.0  # strength of codes in the residual stream, beside a token's own 1
COPIED = 300.0  # strength of what is copied
SUPPRESSED = 2.0  # how much the newest tokens are avoided, for each that is copied
FAR = 6.0  # preference of old tokens to new ones, half of the difference of their scores
PREFERENCE = 2.0  # of other distances, as a standard deviation of scores


@dataclass
class Layer:
    norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(query heads + 2 · KV heads)·D, hidden]
    out: torch.Tensor  # [hidden, query heads · D]
    mlp_norm: torch.Tensor
    up: torch.Tensor  # [2·MLP, hidden]: gate, then up
    down: torch.Tensor  # [hidden, MLP]


@dataclass
class Model:
    heads: int
    kv_heads: int
    dim: int
    epsilon: float
    frequency: torch.Tensor  # [D/2]: of each pair of channels, 0 for those that are not rotated
    embedding: torch.Tensor  # [vocabulary, hidden]
    last_norm: torch.Tensor
    unembedding: torch.Tensor  # [vocabulary, hidden] float32
    layers: list

    @property
    def dtype(self):
        return self.embedding.dtype

    def enter(self, tokens):
        return self.embedding[tokens].float()

    def norm(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight.float(), self.epsilon).to(self.dtype)

    def turns(self, at):
        """Cosines and sines [rows, 1, D/2] of the rotary embedding at these positions."""
        angles = at[:, None, None].float() * self.frequency
        return angles.cos(), angles.sin()

    def rotate(self, x, turns):
        """x [rows, heads, D], turned."""
        (cosine, sine), a, b = turns, x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1).flatten(-2).to(self.dtype)

    def before(self, layer, x, turns):
        """Queries, keys and values [rows, heads, D] of the residual stream x [rows, hidden]."""
        qkv = F.linear(self.norm(x, layer.norm), layer.qkv).unflatten(-1, (-1, self.dim))
        turned = self.rotate(qkv[:, : -self.kv_heads], turns)
        return turned[:, : self.heads], turned[:, self.heads :], qkv[:, -self.kv_heads :]

    def after(self, layer, x, attended):
        """The residual stream after the layer whose attention gave `attended` [rows, query heads, D]."""
        x = x + F.linear(attended.flatten(1), layer.out).float()
        gate, up = F.linear(self.norm(x, layer.mlp_norm), layer.up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down).float()

    def logits(self, x):
        return F.linear(F.rms_norm(x, x.shape[-1:], self.last_norm.float(), self.epsilon), self.unembedding)

    def prompt(self, tokens):
        """Keys and values [tokens, KV heads, D] of a prompt, layer by layer, by torch's attention."""
        x, turns = self.enter(tokens), self.turns(torch.arange(len(tokens), device=tokens.device))
        lead = lambda t: t.transpose(0, 1)[None]  # noqa: E731
        for layer in self.layers:
            q, k, v = self.before(layer, x, turns)
            yield k, v
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
            attended = F.scaled_dot_product_attention(lead(q), lead(k), lead(v), is_causal=True)
            x = self.after(layer, x, attended[0].transpose(0, 1))


def copying(device, dtype, *, hidden, mlp, heads, kv_heads, dim, layers, vocabulary, reach, seed=0):
    """
    A model that continues its text by what followed the same two tokens before, as induction heads do (Olsson et al. 2022), among layers of random
    weights that make its logits a function of all the text. Half of a head's channels are rotated. Each KV head has a code of a token, dim/4 numbers.

    layer 1          query heads of even number attend one token back, others two, by rotated channels of a constant. They write the code of that
                     token to the residual stream, each KV head to subspaces of its own.
    the last but one queries are the codes of the token and of the one before it, keys those of the two before: they match where a token follows the
                     same two. Values are the token itself, which the unembedding reads. Rotated channels prefer some distances, so that of several
                     places that match it depends on the position which one is copied, and old ones to new ones, of up to `reach` tokens before.
                     The first head of each group reads the newest tokens and writes against them, so that the text does not go round in a circle.
    """
    generator = torch.Generator(device).manual_seed(seed)
    random = lambda *shape, scale=1.0: torch.randn(shape, generator=generator, device=device) * scale  # noqa: E731
    zeros = lambda *shape: torch.zeros(shape, device=device)  # noqa: E731
    group, code, half, ones = heads // kv_heads, dim // 4, dim // 2, torch.ones(hidden, device=device)
    frequency = zeros(half)
    frequency[: half // 2] = 50000.0 ** (-torch.arange(half // 2, device=device) / (half // 2))
    turning = frequency[: half // 2]
    embedding = random(vocabulary, hidden)
    embedding[:, 0] = CONSTANT
    # What reads a token's code, where it is written for the next token and for the one after, what reads a token, and where it is written.
    spaces = torch.linalg.qr(random(hidden, 3 * kv_heads * code))[0].T.unflatten(0, (3, kv_heads, code))
    reads, written = spaces[0], spaces[1:].mT
    square = FIRST + 0.4 + 2 * kv_heads * code * WRITTEN**2 / hidden  # mean square of the residual stream's channels after layer 1
    found, told = random(kv_heads, dim, hidden, scale=hidden**-0.5), random(kv_heads, hidden, dim, scale=dim**-0.5)

    def layer(qkv, out):
        down = random(hidden, mlp, scale=mlp**-0.5)
        out[0], down[0] = 0, 0  # nobody writes to the constant's channel
        return Layer(ones, qkv.flatten(0, 1).to(dtype), out.flatten(1).to(dtype), ones, random(2 * mlp, hidden, scale=hidden**-0.5).to(dtype), down.to(dtype))

    def random_layer():
        return layer(random(heads + 2 * kv_heads, dim, hidden, scale=1.5 * hidden**-0.5), random(hidden, heads, dim, scale=(heads * dim) ** -0.5))

    def rotated(rows, amplitude, phase):
        """Sets rows of a projection to a constant in the rotated channels, its pairs turned by a phase."""
        rows[..., 0 : 2 * len(phase) : 2, 0], rows[..., 1 : 2 * len(phase) : 2, 0] = amplitude * phase.cos(), amplitude * phase.sin()

    def looking_back():
        qkv, out = zeros(heads + 2 * kv_heads, dim, hidden), zeros(hidden, heads, dim)
        fast = turning[:8]
        amplitude = (8 * FIRST * dim**0.5 / (1 - fast.cos()).sum()) ** 0.5 / CONSTANT  # a score that is 8 less one token off
        rotated(qkv[heads:-kv_heads], amplitude, 0 * fast)
        qkv[-kv_heads:, :code] = reads
        for head in range(heads):
            rotated(qkv[head], amplitude, -(head % 2 + 1) * fast)
            out[:, head, :code] = WRITTEN * FIRST**0.5 * 2 / group * written[head % 2, head // group]
        return layer(qkv, out)

    def inducing():
        qkv, out = zeros(heads + 2 * kv_heads, dim, hidden), zeros(hidden, heads, dim)
        far = torch.arange(len(turning), device=device) == (turning * reach / math.pi).log().abs().argmin()
        strengths = (torch.where(far, FAR, PREFERENCE * 2 / half**0.5) * square * dim**0.5) ** 0.5 / CONSTANT
        last, before = (score * square * dim**0.5 / (code * gain) for score, gain in ((10, WRITTEN), (8, WRITTEN**2)))
        # Scores of 10 for the newest tokens, hardly any past some 64.
        near = (turning < 1 / 8) & (turning > 1 / 64)
        lately = near * 10 / near.sum() * square * dim**0.5 / (strengths * CONSTANT**2)
        for head in range(heads):
            h = head // group
            out[:, head] = COPIED * (kv_heads * hidden) ** -0.5 * told[h]
            if head % group == 0:
                rotated(qkv[head], lately, 0 * turning)
                out[:, head] *= -SUPPRESSED
                continue
            out[:, head] /= group - 1
            rotated(qkv[head], strengths, torch.where(far, math.pi, 6.28 * torch.rand(len(turning), generator=generator, device=device)))
            qkv[head, half : half + code], qkv[head, half + code :] = last * reads[h], before * written[0, h].T
        for h in range(kv_heads):
            rotated(qkv[heads + h], strengths, 0 * turning)
            qkv[heads + h, half : half + code], qkv[heads + h, half + code :] = written[0, h].T, written[1, h].T
        qkv[-kv_heads:] = found
        return layer(qkv, out)

    made = [random_layer(), looking_back(), *(random_layer() for _ in range(layers - 4)), inducing(), random_layer()]
    unembedding = sum(embedding @ found[h].T @ told[h].T for h in range(kv_heads)) * 1.5 * (kv_heads * hidden) ** -0.5
    return Model(heads, kv_heads, dim, 1e-5, frequency, embedding.to(dtype), ones, unembedding, made)


def phrases(device, count, tokens, vocabulary, seed=0):
    """`count` texts of so many tokens: phrases of 8 to 24 tokens in random order, each some six times."""
    generator = torch.Generator().manual_seed(seed)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    texts = []
    for _ in range(count):
        known, text = [integers(0, vocabulary, n) for n in integers(8, 25, max(4, tokens // 96)).tolist()], []
        while sum(map(len, text)) < tokens:
            text.append(known[integers(0, len(known), 1).item()])
        texts.append(torch.cat(text)[:tokens].to(device))
    return texts


def llama(path, files, count, tokens, device, dtype):
    """The model of a GGUF file, and `count` texts of so many tokens from the files."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "forecast"))
    from model import Llama

    of = Llama(path)
    place = lambda name, dtype=dtype: of.weights[name].to(device, dtype)  # noqa: E731
    join = lambda i, *names: torch.cat([place(f"blk.{i}.{name}.weight") for name in names])  # noqa: E731
    layers = [Layer(join(i, "attn_norm"), join(i, "attn_q", "attn_k", "attn_v"), join(i, "attn_output"), join(i, "ffn_norm"),
                    join(i, "ffn_gate", "ffn_up"), join(i, "ffn_down")) for i in range(of.layers)]
    frequency = of.theta ** (-torch.arange(0, of.dim, 2, device=device) / of.dim)
    embedding = "token_embd.weight"
    unembedding = place("output.weight" if "output.weight" in of.weights else embedding, torch.float32)
    text = of.tokens("\n".join(pathlib.Path(file).read_text() for file in files))
    assert len(text) >= count * tokens, f"{len(text)} tokens of text; expected {count * tokens}"
    model = Model(of.heads, of.kv_heads, of.dim, of.epsilon, frequency, place(embedding), place("output_norm.weight"), unembedding, layers)
    return model, [piece.to(device) for piece in text.split(tokens)[:count]]
