"""What the runtime costs beside torch.autocast: python benchmarks/overhead.py [--json reports/overhead.json].

Each row trains one model three ways in the same interleaved rounds: plain FP32, under `torch.autocast`, and with the
preset that makes autocast's assignment, applied by autoprec. `ratio` is the step time of autoprec over that of autocast
(the fp32 row: over the plain model), the median over rounds with its 95 % interval. A step is forward, loss, backward
and optimizer; the models are sized on this device so that a step under autocast takes about as long as the row says.
`mode_alone` is the same ratio for `torch.autocast` inside a torch function mode that only passes each call on: what
torch asks of anything that sees every call, and so a floor for what casts per site can cost without a compiler.
`intercepts` times single calls, each over the same call without a policy.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1]))

import autoprec
from autoprec.measure import interleave, speedup
from autoprec.runtime.device import describe

LAYERS = 64
MODE_ALONE = "mode_alone"
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Functional(nn.Module):
    """Linear layers with the activation as a function between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def modules(width: int, layers: int) -> nn.Module:
    """Return the same as a Sequential of modules."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


class Block(nn.Module):
    """A block of a GPT as people write them: pre-norm, fused attention, GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after attention and MLP. *Shapes*: (rows, length, width)."""
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level GPT."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits. *Shapes*: (rows, length) -> (rows, length, 256)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the output."""
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def next_byte(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each next byte."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class PassOn(TorchFunctionMode):
    """Sees every call, and runs it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


@contextmanager
def seen_by_a_mode(device: str) -> Iterator[None]:
    """Cast as `torch.autocast` does, under a mode that does nothing."""
    with torch.autocast(device, torch.bfloat16), PassOn():
        yield


class Run:
    """One way to train: a model of its own, and the context in which its forward and loss run."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any, how: str, *, micro: int = 1, compiled: bool = False):
        self.device, self.loss, self.batch, self.micro = batch.device, loss, batch, micro
        model = model.to(self.device)
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext
        if how == "autocast":
            self.context = lambda: torch.autocast(self.device.type, torch.bfloat16)
        elif how == MODE_ALONE:
            self.context = lambda: seen_by_a_mode(self.device.type)
        elif how != "plain":
            self.context = autoprec.apply(model, how).loss
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.model: Any = torch.compile(model) if compiled else model

    def __call__(self) -> None:
        """Train one step of `micro` micro-batches."""
        for _ in range(self.micro):
            with self.context():
                loss = self.loss(self.model, self.batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds(run: Run, steps: int = 25) -> float:
    """Return the time of the fastest of some steps: what others do on the machine only adds to it."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        run()
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        times.append(time.perf_counter() - started)
    return min(times)


def sized(
    make: Callable[[int], nn.Module],
    batch: Callable[[int], Any],
    loss: Loss,
    target_s: float,
    *,
    compiled: bool = False,
) -> int:
    """Return the size whose step under autocast comes nearest to `target_s` from below: doubled, then bisected."""

    def fits(size: int) -> bool:
        return seconds(Run(make(size), loss, batch(size), "autocast", compiled=compiled)) <= target_s

    size = 4
    while size < 2**18 and fits(2 * size):
        size *= 2
    for step in (size // 2, size // 4, size // 8):
        if step and fits(size + step):
            size += step
    return size


def compare(
    make: Callable[[], nn.Module], loss: Loss, batch: Any, rounds: int, *, policy: str = "autocast-bf16", **how: Any
) -> Mapping[str, Any]:
    """Return step times and the ratio of autoprec to what it is measured against."""
    against = "plain" if policy == "fp32" else "autocast"
    has_mode = policy != "fp32" and not how.get("compiled")
    names = dict.fromkeys(("plain", against, *([MODE_ALONE] if has_mode else []), policy))
    runs = {name: Run(make(), loss, batch, name, **how) for name in names}
    times = interleave(runs, rounds=rounds, device=batch.device)
    found = speedup(times[policy], times[against])
    row = {
        "step_ms": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
        "ratio": round(found.median, 4),
        "interval": [round(found.low, 4), round(found.high, 4)],
        "against": against,
    }
    return row | ({MODE_ALONE: round(speedup(times[MODE_ALONE], times[against]).median, 4)} if has_mode else {})


def rows(device: torch.device, rounds: int, *, tiny: bool, compiled: bool) -> dict[str, Any]:
    """Return the rows of the table."""

    def noise(width: int) -> torch.Tensor:
        return torch.randn(4, width, device=device, generator=torch.Generator(device).manual_seed(0))

    def text(size: int) -> torch.Tensor:
        """Return a row of four times so many bytes, or from 64 bytes on rows of 32, and the byte that follows each."""
        shape = (1, 4 * size + 1) if size < 16 else (size // 8, 33)
        return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(device)

    unit = 4
    width = unit * (1 if tiny else sized(lambda n: Functional(unit * n, LAYERS), lambda n: noise(unit * n), mean, 8e-3))
    gpt_width, gpt_layers = (32, 1) if tiny else (128, 6)

    def gpt(_: int = 0) -> nn.Module:
        return GPT(gpt_width, gpt_layers)

    ids = text(8 if tiny else sized(gpt, text, next_byte, 0.1))
    heavy, few = (64, 2) if tiny else (2048, 4)
    gpt_row = f"GPT of {gpt_layers} blocks, width {gpt_width}, {ids.shape[0]} rows of {ids.shape[1] - 1} bytes"
    mlp_row = f"MLP of {LAYERS} layers, width {width}"
    many = 10 * rounds  # of the small steps
    table = {
        gpt_row: compare(gpt, next_byte, ids, rounds),
        f"{mlp_row}, functional activations": compare(lambda: Functional(width, LAYERS), mean, noise(width), many),
        f"{mlp_row}, modules": compare(lambda: modules(width, LAYERS), mean, noise(width), many),
        f"{mlp_row}, fp32 policy": compare(lambda: modules(width, LAYERS), mean, noise(width), many, policy="fp32"),
        f"MLP of {few} layers, width {heavy}, 8 micro-batches of 1 row": compare(
            lambda: modules(heavy, few), mean, noise(heavy)[:1], max(rounds // 3, 6), micro=8
        ),
    }
    if compiled:
        table[f"compiled {gpt_row}"] = compare(gpt, next_byte, ids, rounds, compiled=True)
        unit = 16  # few sizes, since each is compiled
        wider = (
            4
            if tiny
            else unit * sized(lambda n: modules(unit * n, LAYERS), lambda n: noise(unit * n), mean, 8e-3, compiled=True)
        )
        for each in dict.fromkeys((width, wider)):
            table[f"compiled MLP of {LAYERS} layers, width {each}"] = compare(
                lambda each=each: modules(each, LAYERS), mean, noise(each), many, compiled=True
            )
    return table


def intercepts(rounds: int) -> dict[str, float]:
    """Return microseconds that one call costs more under a policy: on the CPU, where nothing hides the host."""
    x = torch.randn(4, 4).bfloat16().requires_grad_(requires_grad=False)
    plain = nn.ModuleDict({"linear": nn.Linear(4, 4), "relu": nn.ReLU()})
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "relu": nn.ReLU()})
    precision = autoprec.apply(model, "autocast-bf16")
    low = nn.Linear(4, 4).bfloat16()

    def timed(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        for _ in range(2000):
            call()
        return (time.perf_counter() - started) / 2000 * 1e6

    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "a function the policy never touches (torch.relu)": (lambda: torch.relu(x), lambda: torch.relu(x)),
        "an attribute (x.dtype)": (lambda: x.dtype, lambda: x.dtype),
        "a module the policy never touches (nn.ReLU)": (lambda: plain["relu"](x), lambda: model["relu"](x)),
        "nn.Linear whose weight is cast already": (lambda: low(x), lambda: model["linear"](x)),
        "a function that is cast (torch.mm)": (lambda: torch.mm(x, x), lambda: torch.mm(x, x)),
    }
    differences: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        before = {name: timed(pair[0]) for name, pair in calls.items()}
        with precision.loss():
            for name, pair in calls.items():
                differences[name].append(timed(pair[1]) - before[name])
    return {name: round(statistics.median(each), 2) for name, each in differences.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60, help="ten times as many of the MLP's steps")
    parser.add_argument("--threads", type=int, help="threads of the CPU (default: torch's)")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that the script runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    result = {
        "command": "python benchmarks/overhead.py " + " ".join(sys.argv[1:]),
        "device": describe(device.type).name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "rows": rows(device, options.rounds, tiny=options.tiny, compiled=not options.no_compile),
        "intercepts_us": intercepts(max(options.rounds // 3, 3)),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
