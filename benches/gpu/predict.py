"""The predictor and the forecast beside torch, in one process: element-wise updates and topk, and two float32 matrix products.

    python benches/gpu/predict.py [--out FILE]

`forecast`: a residual stream of 4096 channels to 32 heads of 128, bfloat16 in and out, RoPE, through maps in float32, cut to rank 128 or
whole (0). `predictor`: 8 KV heads, 128 of nb blocks at ratio 1.25; `update` takes a step's scores, `predict` lists the next step's
blocks, `both` is one after the other. `calibration`: the built-in grid of 100 points over 64 score rows of 8 KV heads, an eighth of nb
blocks at ratio 1.25, milliseconds of the call that waits; `same` says that a CPU session, timed beside it, gave the same bits. Every result is compared with torch's before it is timed. `event` is one call between two CUDA
events, the host's time in it; `graph` is GPU time, from calls in a CUDA graph. `floor` is the time in which the device copies as many
bytes as the map or the state has, half of them read; `empty` is an empty kernel in the same graph. Microseconds where nothing else is
said, medians; inputs are in no cache, but for calibration.
"""

import json
import math
import statistics
import tempfile
import time

import torch

from timing import run, vanward

INPUTS, Q_HEADS, DIM = 4096, 32, 128
OUTPUTS = Q_HEADS * DIM
HEADS, K, CAP, BLOCK = 8, 128, 160, 64
HOLT = vanward.Holt(0.5, 0.25, 1.0)


class Maps:
    """Random maps of several layers, as a file and loaded."""

    def __init__(self, session, layers, rank):
        def matrix(*shape):
            return torch.randn(shape, device="cuda") / math.sqrt(shape[1])

        names = ("down", "up") if rank else ("weight",)
        self.factors = [[matrix(rank, INPUTS + 1), matrix(OUTPUTS, rank)] if rank else [matrix(OUTPUTS, INPUTS + 1)] for _ in range(layers)]
        self.bytes = sum(factor.nbytes for factor in self.factors[0])
        sizes = dict(layers=layers, input_dim=INPUTS, q_heads=Q_HEADS, head_dim=DIM, flags=0)
        header = {"__metadata__": {"format": "vanward.forecast", "version": "2", **{key: str(n) for key, n in sizes.items()}}}
        values = [(f"layer.{i}.{name}", factor) for i, factors in enumerate(self.factors) for name, factor in zip(names, factors)]
        end = 0
        for name, factor in values:
            header[name] = {"dtype": "F32", "shape": list(factor.shape), "data_offsets": [end, end + factor.nbytes]}
            end += factor.nbytes
        text = json.dumps(header).encode()
        with tempfile.NamedTemporaryFile() as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, factor in values:
                file.write(factor.cpu().numpy().tobytes())
            file.flush()
            self.forecast = vanward.Forecast.load(session, file.name)


def turned(q, cosine, sine):
    """q [B, heads, DIM]; cosine and sine [B, 1, DIM / 2]."""
    x, y = q.split(DIM // 2, dim=-1)
    return torch.cat([x * cosine - y * sine, x * sine + y * cosine], dim=-1)


def angles(positions):
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, device="cuda", dtype=torch.float64) / DIM)
    turns = positions.double()[:, None, None] * frequencies
    return turns.cos(), turns.sin()


def projected(x, factors, cosine, sine):
    """What a model would do: [x / rms, 1], the products, the embedding."""
    x = x.to(factors[0].dtype)
    x = x * (x * x).mean(-1, keepdim=True).rsqrt()
    x = torch.addmm(factors[0][:, -1], x, factors[0][:, :-1].T)
    for factor in factors[1:]:
        x = x @ factor.T
    return turned(x.view(len(x), Q_HEADS, DIM), cosine, sine)


def forecasts(session, timer, rows):
    for rank, batches, layers in ((128, (1, 4, 8, 16, 64, 256), 20), (0, (1, 16), 4)):
        maps = Maps(session, layers, rank)
        size = maps.bytes
        for batch in batches:
            x = torch.randn(batch, INPUTS, device="cuda").bfloat16()
            positions = torch.randint(0, 100_000, (batch,), dtype=torch.int32, device="cuda")
            q = torch.empty(batch, Q_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
            calls = [maps.forecast.prepare_project(layer=i, x=x, positions=positions, q=q) for i in range(layers)]
            cosine, sine = angles(positions)

            def ours(i):
                calls[i](stream=torch.cuda.current_stream().cuda_stream)

            ours(0)
            expected = projected(x, [factor.double() for factor in maps.factors[0]], cosine, sine)
            error = ((q.double() - expected).norm() / expected.norm()).item()
            assert error < 3e-3, f"{error}: more than bfloat16 rounds"
            cosine, sine = cosine.float(), sine.float()
            peer = lambda i: q.copy_(projected(x, maps.factors[i], cosine, sine))  # noqa: E731
            row = dict(rank=rank, batch=batch, error=f"{error:.1e}", floor=timer.copy(size), empty=timer.graph(timer.launch_empty, 20))
            row.update(vanward_graph=timer.graph(ours, layers), torch_graph=timer.graph(peer, layers))
            row.update(vanward_event=timer.event(ours, layers), torch_event=timer.event(peer, layers))
            rows.put("forecast", **row)
        maps.forecast.close()


class Predictor:
    """`sets` states of one shape, and the library's calls on each."""

    def __init__(self, session, batch, blocks):
        shape = (batch, HEADS, blocks)
        self.bytes = 3 * math.prod(shape) * 4
        self.sets = min(20, max(2, math.ceil((384 << 20) / self.bytes)))
        self.level, self.trend, self.scores = ([torch.randn(shape, device="cuda") for _ in range(self.sets)] for _ in range(3))
        self.lens = torch.full((batch,), blocks * BLOCK, dtype=torch.int32, device="cuda")
        self.ids = torch.empty(batch, HEADS, CAP, dtype=torch.int32, device="cuda")
        self.counts = torch.empty(batch, HEADS, dtype=torch.int32, device="cuda")
        states = [vanward.PredictorState(level, trend) for level, trend in zip(self.level, self.trend)]
        same = dict(block_size=BLOCK, seq_lens=self.lens, holt=HOLT)
        self.updates = [session.prepare_predictor_update(state=s, scores=x, **same) for s, x in zip(states, self.scores)]
        predicted = vanward.BlockList(self.ids, self.counts)
        self.predictions = [session.prepare_predictor_predict(state=s, k=K, ratio=1.25, predicted=predicted, **same) for s in states]

    def update(self, i):
        self.updates[i](stream=torch.cuda.current_stream().cuda_stream)

    def predict(self, i):
        self.predictions[i](stream=torch.cuda.current_stream().cuda_stream)

    def both(self, i):
        self.update(i)
        self.predict(i)

    def torch_update(self, i):
        level = torch.lerp(self.level[i], self.scores[i], HOLT.alpha)
        self.trend[i].lerp_(level - self.level[i], HOLT.beta)
        self.level[i].copy_(level)

    def torch_predict(self, i):
        return (self.level[i] + HOLT.gamma * self.trend[i]).topk(CAP, dim=-1).indices.sort(dim=-1).values

    def torch_both(self, i):
        self.torch_update(i)
        self.torch_predict(i)

    def check(self):
        level, trend = self.level[0].clone(), self.trend[0].clone()
        self.both(0)
        torch.cuda.synchronize()
        ours = self.level[0].clone(), self.trend[0].clone()
        self.level[0].copy_(level), self.trend[0].copy_(trend)
        self.torch_update(0)
        for a, b in zip(ours, (self.level[0], self.trend[0])):
            assert torch.allclose(a, b, atol=1e-5), "state"
        self.level[0].copy_(ours[0]), self.trend[0].copy_(ours[1])
        assert torch.equal(self.ids.long(), self.torch_predict(0)), "ids"


def predictors(session, timer, rows):
    for batch, blocks in ((1, 512), (1, 2048), (1, 8192), (16, 2048), (64, 2048)):
        case = Predictor(session, batch, blocks)
        case.check()
        row = dict(batch=batch, blocks=blocks, floor=timer.copy(case.bytes), empty=timer.graph(timer.launch_empty, 20))
        for name in ("update", "predict", "both"):
            row[f"{name}_graph"] = timer.graph(getattr(case, name), case.sets)
        row.update(torch_graph=timer.graph(case.torch_both, case.sets), both_event=timer.event(case.both, case.sets))
        rows.put("predictor", **row)


def calibrations(session, rows):
    steps = 64
    with vanward.Session("cpu") as host:
        # 16K, 64K and 512K tokens.
        for blocks in (256, 1024, 8192):
            # Scores that drift: the steps of a random walk beside its start.
            walk = torch.randn(1, steps, HEADS, blocks, device="cuda").mul_(0.2).cumsum(dim=1)
            scores = walk + torch.randn(1, 1, HEADS, blocks, device="cuda") + 0.3 * torch.randn_like(walk)
            counts = torch.full((1, steps), blocks, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()

            def milliseconds(where, repeats, **tensors):
                took, found = [], None
                for _ in range(repeats + 1):
                    begin = time.perf_counter()
                    found = where.predictor_calibrate(k=blocks // 8, init_blocks=1, local_blocks=1, ratio=1.25, **tensors)
                    took.append((time.perf_counter() - begin) * 1e3)
                return statistics.median(took[1:]), found

            ours, best = milliseconds(session, 20, scores=scores, block_counts=counts)
            cpu, expected = milliseconds(host, 3, scores=scores.cpu().numpy(), block_counts=counts.cpu().numpy())
            assert best == expected, f"{best}, on the CPU {expected}"
            rows.put("calibration", blocks=blocks, tokens=blocks * BLOCK, cuda_ms=ours, cpu_ms=cpu, hit_rate=best[1], same=best == expected)


def measure(session, timer, rows, _quick):
    torch.backends.cuda.matmul.allow_tf32 = False
    forecasts(session, timer, rows)
    predictors(session, timer, rows)
    calibrations(session, rows)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=64 << 20)
