"""The text of drafts by sparse attention that dense attention verifies, beside the text of dense steps, token for token.

    python benches/gpu/self_text.py [--device cuda | cpu] [--out FILE] [--quick] [--invariant N] [--tokens N] [--prompt N] [--batch N]
                                    [--model FILE.gguf [--text FILE ...]]

A whole decoding loop in torch over vwd_decoder: embedding, layers, logits, argmax. The model is of Llama 3 8B's shape with fewer layers. Its weights are
constructed (text_model.py): it continues a text by what followed the same two tokens earlier in it, with random layers between, and prompts
are phrases in random order. So what it says depends on blocks far back, which sparse attention has to select. With --model it is a real one, such as
SmolLM2-135M, and prompts are pieces of --text, by default of these scripts; that takes the packages gguf and tokenizers.

`reference` is the text of DENSE steps of one position. `text` rows are those of SELF: the drafts that the decoder recommends for each sequence, by SPARSE steps
of one position, a DENSE step that verifies them, vwd_decoder_accept. Lists are by AXIS and by MINMAX, or of the first and newest blocks alone (`recent`), whose
acceptance says how much the text depends on others. What is not attention runs one position at a time in every step, so that its bits are the same for the same
text, and attention alone can differ.

`equal` counts the tokens that are those of dense decoding, of all that were `compared`: one that is not is replaced by it, and the text goes on. `until_first` counts
those before the first such token of each sequence. `accepted` is the share of drafts, `per_round` the tokens of a verification. `apart` is the largest difference of
layer 0's attention, whose inputs have the same bits, in units of the tolerance that docs/decoder.md states, (8e-5 + 4ε)·(1 + |out|); `relative` is the
norm of these differences over that of the outputs. `moved` is the largest difference of a logit.

A `difference` row is a token that is not dense decoding's. `margin` says how much better that one is by the logits of dense decoding, and `gap` how far their two best ones
are apart. `explained` is the most by which this margin moves where the step is repeated, once as it was and eight times with every output of attention
moved up or down by the tolerance; `likely` is the same where they move by no more than layer 0's were apart. A margin larger than `explained` fails, and so
do outputs that are further apart than the tolerance. On the CPU, and by --invariant in a batch-invariant session made for N sequences, every difference fails, of a token, a logit or an output. `unverified` is what SPARSE steps alone
say after the same text, and `beyond` how many of the `firsts`, each sequence's first difference, would have failed.
"""

import argparse
import ctypes
import os
import pathlib
import sys

import torch

import text_model
from timing import Rows, vanward
from vanward import DecoderMode, DecoderPolicy, SelectMethod

DRAFTS = 8
INIT, LOCAL = 1, 2
ABSOLUTE = 8e-5
EPSILON = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 0.0}
REPETITIONS = 8
HERE = pathlib.Path(__file__).parent


def tensor_of(view, device):
    """An array of int32 in the decoder's memory as a tensor over the same memory."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_int32 * view.shape[0]).from_address(view.data), dtype=torch.int32)
    interface = dict(shape=(view.shape[0],), typestr="<i4", data=(view.data, False), version=3)
    return torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": interface})(), device="cuda")


class Sequences:
    """A decoder, and pages that have the prompts of `texts` but for their last tokens, which the first step takes."""

    def __init__(self, session, model, texts, block, room, method=SelectMethod.AXIS, k=0):
        self.model, self.batch, self.page = model, len(texts), block
        self.device = texts[0].device
        self.starts = torch.tensor([len(text) for text in texts], dtype=torch.int32, device=self.device)
        self.last = torch.stack([text[-1] for text in texts])
        pages = -(-(max(map(len, texts)) + room) // block)
        mixed = torch.randperm(self.batch * pages, generator=torch.Generator().manual_seed(1))
        self.table = mixed.int().view(self.batch, pages).to(self.device)
        shape = (self.batch * pages, block, model.kv_heads, model.dim)
        self.keys, self.values = ([torch.zeros(shape, dtype=model.dtype, device=self.device) for _ in model.layers] for _ in range(2))
        self.begin = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
        self.decoder = vanward.Decoder(
            session, dtype=str(model.dtype).removeprefix("torch."), layers=len(model.layers), max_rows=self.batch, max_positions=DRAFTS + 1,
            query_heads=model.heads, kv_heads=model.kv_heads, key_dim=model.dim, value_dim=model.dim, page_size=block, pages=len(self.keys[0]), block_size=block,
            draft_cost=0.3, policy=DecoderPolicy(method=method, k=k or INIT + LOCAL, init_blocks=INIT, local_blocks=LOCAL))

    def fill(self, texts):
        for i, text in enumerate(texts):
            at = torch.arange(len(text) - 1, device=self.device)
            slots = self.table[i].long()[at // self.page] * self.page + at % self.page
            for layer, (k, v) in enumerate(self.model.prompt(text[:-1])):
                self.keys[layer].flatten(0, 1)[slots], self.values[layer].flatten(0, 1)[slots] = k, v
        return self

    def copy(self, other):
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for a, b in zip(mine, theirs):
                a.copy_(b)
        return self

    def step(self, mode, tokens, lens, q_lens=None, disturb=lambda out: out):
        """Logits [B, Q, vocabulary] of tokens [B, Q], the last of which are at positions `lens` − 1, and layer 0's attention [B, Q, heads, D]."""
        model, positions = self.model, tokens.shape[1]
        q_lens = torch.full_like(lens, positions) if q_lens is None else q_lens
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        self.decoder.begin(mode=mode, positions=positions, seq_lens=lens, q_lens=q_lens, page_table=self.table, begin=self.begin, stream=stream)
        each = range(positions)
        turns = [model.turns(lens - q_lens + r) for r in each]
        x = [model.enter(tokens[:, r].contiguous()) for r in each]
        for i, layer in enumerate(model.layers):
            q, k, v = (torch.stack(parts, 1) for parts in zip(*(model.before(layer, x[r], turns[r]) for r in each)))
            out = torch.empty_like(q)
            self.decoder.attend(layer=i, k=self.keys[i], v=self.values[i], new_k=k, new_v=v, q=q, out=out, stream=stream)
            if i == 0:
                first = out
            out = disturb(out)
            x = [model.after(layer, x[r], out[:, r].contiguous()) for r in each]
        self.begin = None
        return torch.stack([model.logits(x[r]) for r in each], 1), first


class Reference:
    """What dense steps give: tokens [tokens, B], logits, and the attention of layer 0."""

    def __init__(self, sequences, tokens):
        self.sequences, token, found = sequences, sequences.last, []
        for n in range(tokens):
            logits, first = sequences.step(DecoderMode.DENSE, token[:, None], sequences.starts + n)
            token = logits[:, 0].argmax(-1)
            found.append((token, logits[:, 0], first[:, 0]))
        self.tokens, self.logits, self.first = (torch.stack(parts) for parts in zip(*found))

    def explained(self, places, others, share=1.0):
        """
        By how much the margin of dense decoding's token over `others` [B] moves in the steps of tokens `places` [B]: the most of a repetition, and of
        some with attention's outputs moved by this share of the tolerance.
        """
        s, rows = self.sequences, torch.arange(len(places), device=places.device)
        before = torch.where(places > 0, self.tokens[(places - 1).clamp(0), rows], s.last)
        generator = torch.Generator(places.device).manual_seed(2)

        def disturb(out):
            signs = torch.randint(0, 2, out.shape, generator=generator, device=out.device) * 2 - 1
            return (out.float() + signs * share * tolerance(out)).to(out.dtype)

        def margin(disturb):
            logits, _ = s.step(DecoderMode.DENSE, before[:, None], s.starts + places.int(), disturb=disturb)
            return self.margins(logits[:, 0], places, others)

        exact = self.margins(self.logits[places, rows], places, others)
        moved = [(margin(how) - exact).abs() for how in (lambda out: out, *[disturb] * REPETITIONS)]
        margin(lambda out: out)  # which restores keys and values
        return torch.stack(moved).amax(0)

    def margins(self, logits, places, others):
        """How much better the tokens `places` [B] of the text are than `others` [B], by logits [B, vocabulary]."""
        rows = torch.arange(len(places), device=places.device)
        return logits[rows, self.tokens[places, rows]] - logits[rows, others]


def tolerance(out):
    return (ABSOLUTE + 4 * EPSILON[out.dtype]) * (1 + out.float().abs())


class Compared:
    """Holds the text of SELF against the reference's as it comes."""

    def __init__(self, reference):
        self.reference, self.known, self.count = reference, reference.tokens.tolist(), 0
        self.differences = [[] for _ in self.known[0]]  # of each sequence: which tokens differ, and what they are
        self.apart = self.moved = self.error = self.norm = 0.0

    @property
    def until_first(self):
        return sum(found[0][0] if found else len(self.known) for found in self.differences)

    def take(self, done, accepted, target, logits, first):
        """
        A step in which row i, which has made done[i] tokens, is given the first accepted[i] + 1 of `target`: of rows whose tokens differ, how many are equal before
        the first one, and what the reference has in its place.
        """
        known, places, cuts = self.known, [], {}
        for i, row in enumerate(target):
            for r in range(accepted[i] + 1):
                n = done[i] + r
                if n >= len(known):
                    break
                places.append((n, i, r))
                if row[r] == known[n][i]:
                    self.count += 1
                else:
                    self.differences[i].append((n, row[r]))
                    cuts[i] = r, known[n][i]
                    break
        if not places:
            return cuts
        n, i, r = torch.tensor(places, device=logits.device).T
        want, got = self.reference.first[n, i].float(), first[i, r].float()
        off = (got - want).abs()
        self.apart = max(self.apart, (off / tolerance(self.reference.first[n, i])).max().item())
        self.error, self.norm = self.error + off.square().sum().item(), self.norm + want.square().sum().item()
        self.moved = max(self.moved, (logits[i, r] - self.reference.logits[n, i]).abs().max().item())
        return cuts


def decode(sequences, reference, tokens):
    """SELF's text beside the reference's: what was compared, verifying steps, drafted and accepted tokens."""
    batch, device = sequences.batch, sequences.device
    compared, done = Compared(reference), [0] * batch
    recommended = tensor_of(sequences.decoder.info().draft_lens, device.type)
    last, rounds, drafted, kept = sequences.last, 0, 0, 0
    accepted, following = torch.zeros(batch, dtype=torch.int32, device=device), torch.zeros(batch, dtype=torch.int32, device=device)
    while min(done) < tokens:
        goes_on = torch.tensor([n < tokens for n in done], dtype=torch.int32, device=device)
        lens = sequences.starts + torch.tensor(done, dtype=torch.int32, device=device)
        drafts = recommended.clone() * goes_on
        most = max(1, drafts.max().item())
        draft, token = torch.zeros(batch, most, dtype=torch.int32, device=device), last
        for j in range(most):
            takes_part = (j < drafts).int()
            logits, _ = sequences.step(DecoderMode.SPARSE, token[:, None], lens + takes_part * j, takes_part)
            token = logits[:, 0].argmax(-1)
            draft[:, j] = token
        inputs = torch.cat([last[:, None], draft.long()], 1)
        logits, first = sequences.step(DecoderMode.DENSE, inputs, lens + drafts, (drafts + 1) * goes_on)
        target = logits.argmax(-1).int()
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        sequences.decoder.accept(draft=draft, target=target, draft_lens=drafts, accepted=accepted, next_token=following, stream=stream)
        accepts, goes = accepted.tolist(), goes_on.tolist()
        cuts = compared.take(done, [a if g else -1 for a, g in zip(accepts, goes)], target.tolist(), logits, first)
        for i, (equal, token) in cuts.items():
            accepts[i], following[i] = equal, token
        done = [n + (a + 1) * g for n, a, g in zip(done, accepts, goes)]
        last = torch.where(goes_on.bool(), following.long(), last)
        rounds, drafted, kept = rounds + sum(goes), drafted + drafts.sum().item(), kept + sum(a * g for a, g in zip(accepts, goes))
    return compared, rounds, drafted, kept


def margins(reference, differences, apart):
    """Of each difference, as (sequence, token, row): how much better the reference's token was by its logits, the distance of its two best ones, and so on."""
    batch, tokens, device = reference.tokens.shape[1], len(reference.tokens), reference.tokens.device
    for turn in range(max(map(len, differences))):
        found = {i: known[turn] for i, known in enumerate(differences) if turn < len(known)}
        places, others = torch.tensor([found.get(i, (tokens - 1, 0)) for i in range(batch)], device=device).T
        logits = reference.logits[places, torch.arange(batch, device=device)]
        best = logits.topk(2).values
        columns = (reference.margins(logits, places, others), best[:, 0] - best[:, 1], reference.explained(places, others), reference.explained(places, others, apart))
        for i, column in enumerate(zip(*(column.tolist() for column in columns))):
            if i in found:
                yield i, found[i][0], dict(zip(("margin", "gap", "explained", "likely"), column))


def report(rows, name, k, sequences, reference, tokens, is_exact):
    """Puts the rows of a policy; what is wrong with it, as sentences."""
    compared, rounds, drafted, kept = decode(sequences, reference, tokens)
    wrong = []
    rows.put("text", lists=name, k=k, compared=sequences.batch * tokens, equal=compared.count, until_first=compared.until_first, drafted=drafted,
             accepted=kept / drafted, per_round=(kept + rounds) / rounds, apart=compared.apart, relative=(compared.error / compared.norm) ** 0.5, moved=compared.moved)
    if compared.apart > 1:
        wrong.append(f"{name}: outputs are {compared.apart:.2f} times the tolerance apart")
    for i, n, row in margins(reference, compared.differences, compared.apart):
        rows.put("difference", lists=name, sequence=i, token=n, **row)
        if row["margin"] > row["explained"]:
            wrong.append(f"{name}: sequence {i} differs at token {n} by a margin of {row['margin']:.4f}; rounding explains {row['explained']:.4f}")
    missing = sequences.batch * tokens - compared.count
    if is_exact and (missing or compared.apart or compared.moved):
        wrong.append(f"{name}: {missing} differences where none may be, outputs {compared.apart} apart, logits {compared.moved}")
    return wrong


def unverified(rows, k, sequences, reference, tokens):
    """What SPARSE steps alone say after the reference's text."""
    compared, token = Compared(reference), sequences.last
    for n in range(tokens):
        logits, first = sequences.step(DecoderMode.SPARSE, token[:, None], sequences.starts + n)
        compared.take([n] * sequences.batch, [0] * sequences.batch, logits.argmax(-1).tolist(), logits, first)
        token = reference.tokens[n]
    firsts = [found[:1] for found in compared.differences]
    rows.put("unverified", lists="axis", k=k, compared=sequences.batch * tokens, equal=compared.count, until_first=compared.until_first,
             firsts=sum(map(len, firsts)), beyond=sum(row["margin"] > row["explained"] for _, _, row in margins(reference, firsts, compared.apart)))


def made(o):
    """The model, its texts, the tokens of a block, and k."""
    is_gpu = o.device == "cuda"
    batch, prompt = o.batch or (8 if is_gpu else 3), o.prompt or ((7424 if o.model else 8192) if is_gpu else 448)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    block = 64 if is_gpu else 16
    if o.model:
        model, texts = text_model.llama(o.model, o.text or sorted(HERE.glob("*.py")), batch, prompt, o.device, dtype)
    else:
        sizes = dict(hidden=4096, mlp=14336, heads=32, kv_heads=8, dim=128, layers=6, vocabulary=8192) if is_gpu else \
            dict(hidden=512, mlp=1024, heads=8, kv_heads=2, dim=128, layers=4, vocabulary=512)
        model = text_model.copying(o.device, dtype, **sizes, reach=prompt)
        texts = text_model.phrases(o.device, batch, prompt, sizes["vocabulary"])
    # Ragged: from half of the longest to the longest.
    texts = [text[: prompt // 2 + (prompt - prompt // 2) * (i + 1) // batch - 7 * i] for i, text in enumerate(texts)]
    return model, texts, block, max(8, prompt // block // 8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", help="file for one JSON object a row")
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, and AXIS alone")
    parser.add_argument("--invariant", type=int, default=0, metavar="N", help="a batch-invariant session made for N sequences")
    parser.add_argument("--tokens", type=int, help="tokens of each sequence; default: 512, on the CPU 96")
    parser.add_argument("--prompt", type=int, help="tokens of the longest prompt")
    parser.add_argument("--batch", type=int, help="sequences")
    parser.add_argument("--model", help="GGUF file of a Llama model")
    parser.add_argument("--text", nargs="+", help="files that prompts of --model are pieces of")
    o = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses cuBLAS where algorithms are to be deterministic
    torch.use_deterministic_algorithms(True)
    if o.device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = (o.tokens or (512 if o.device == "cuda" else 96)) // (8 if o.quick else 1)
    rows, wrong = Rows(o.out), []
    with torch.no_grad(), vanward.Session(o.device, invariant_batch=o.invariant) as session:
        model, texts, block, k = made(o)
        rows.put("machine", device=session.info().device_name, torch=torch.__version__, vanward=vanward.__version__,
                 model=pathlib.Path(o.model).name if o.model else "copying", layers=len(model.layers), heads=f"{model.heads}/{model.kv_heads}", dim=model.dim,
                 dtype=str(model.dtype).removeprefix("torch."), block=block, invariant=o.invariant)
        prompts = Sequences(session, model, texts, block, tokens + DRAFTS + 1).fill(texts)
        room = lambda **policy: Sequences(session, model, texts, block, tokens + DRAFTS + 1, **policy).copy(prompts)  # noqa: E731
        reference = Reference(room(), tokens)
        rows.put("reference", sequences=len(texts), shortest=min(map(len, texts)), longest=max(map(len, texts)), tokens=tokens)
        for name, policy in dict(axis=dict(method=SelectMethod.AXIS, k=k), minmax=dict(method=SelectMethod.MINMAX, k=k), recent=dict(k=INIT + LOCAL)).items():
            if not o.quick or name == "axis":
                wrong += report(rows, name, policy["k"], room(**policy), reference, tokens, o.device == "cpu" or o.invariant > 0)
        unverified(rows, k, room(method=SelectMethod.AXIS, k=k), reference, tokens)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
