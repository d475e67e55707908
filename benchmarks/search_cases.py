"""Workloads of benchmarks/search_efficiency.py: small, 64 wide, each with FP32 islands that bf16 really breaks.

`gpt` normalizes by E[x^2] - E[x]^2 a residual stream whose mean is far from zero; `conv` standardizes raw pixels in the
same way before a few convolutions; `trend` fits what is left of a large trend, which it adds back before the loss.
Three have several traps of different kinds, apart from each other: `forecast` standardizes prices by hand, reads the
phase of late times, and adds the running sum of its steps to the last price; `scan` mixes a sequence by weights that
decay with the distance of places in the whole text, in each block, and ends in a norm as that of `gpt`; `pairs`
compares embeddings that share an offset by |x|^2 + |y|^2 - 2xy, over a log-sum-exp written out, after inputs with the
naive variance.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoprec import Workload

WIDTH, HEADS, CONTEXT, LONG, BATCH, COUNT = 64, 4, 16, 64, 4, 24
TEXT = torch.frombuffer(bytearray((Path(__file__).parents[1] / "LICENSE").read_bytes()), dtype=torch.uint8)
Pair = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """A norm whose variance is a difference of two large numbers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x with mean 0 and variance 1."""
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance.clamp_min(0) + 1e-5) * self.gain


class Block(nn.Module):
    """Attention and MLP, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what it attends to."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, -1e4).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A byte-level transformer; the mean of its residual stream is 12."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02 + 12)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = Norm(), nn.Linear(WIDTH, 256)
        nn.init.normal_(self.token.weight, std=0.3)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte."""
        return self.head(self.norm(self.blocks(self.token(text) + self.position)))  # type: ignore[no-any-return]


class Conv(nn.Module):
    """A small convolution net over raw pixels, which it standardizes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Norm(64)
        self.convs = nn.ModuleList(
            [nn.Conv2d(3, 16, 3, padding=1), *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))]
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of the class."""
        x = self.stem(pixels.flatten(2)).unflatten(-1, (8, 8))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.silu(norm(conv(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Trend(nn.Module):
    """An MLP beside a large trend."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.level = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(900.0))
        self.layers = nn.ModuleList(nn.Linear(8 if k == 0 else WIDTH, WIDTH) for k in range(5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value at the time that the first feature is, in hundreds."""
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y)) * 1.2
        return self.level + self.slope * (100 * x[:, 0]) + self.head(y)[:, 0]  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """A residual MLP behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what the MLP adds."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Forecast(nn.Module):
    """Forecasts the next prices from windows of prices and their times."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.tensor([math.pi / 4, math.pi / 7, math.pi / 12]), requires_grad=False)
        self.read = nn.Linear(7 * CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Mlp(), Mlp(), Mlp())
        self.head = nn.Linear(WIDTH, CONTEXT)

    def forward(self, prices: Tensor, times: Tensor) -> Tensor:
        """Return as many further prices as the window has."""
        mean = prices.mean(-1, keepdim=True)
        scale = ((prices * prices).mean(-1, keepdim=True) - mean * mean).clamp_min(1e-3).sqrt()
        phases = times[..., None] * self.frequencies
        seasons = torch.cat([phases.sin(), phases.cos()], -1).flatten(1)
        x = self.blocks(self.read(torch.cat([(prices - mean) / scale, seasons], -1)))
        return prices[:, -1:] + torch.cumsum(self.head(x), -1)  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """Mixes a sequence by weights that decay with time, as gated linear attention does in its parallel form."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.gate, self.write = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Return x with what each place reads of those before it."""
        y = self.norm(x)
        q, k, v = self.read(y).chunk(3, -1)
        rate = F.softplus(self.gate(y)) / 4
        decay = torch.exp(-rate * (places[:, :, None] - places[:, None, :])).tril()
        weights = torch.tanh(q @ k.transpose(-1, -2) / WIDTH) + 1
        return x + self.write((weights * decay) @ v)


class Scan(nn.Module):
    """A byte-level model of decaying memory over long windows."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.mixers, self.mlps = nn.ModuleList([Mixer(), Mixer()]), nn.ModuleList([Mlp(), Mlp()])
        self.offset = nn.Parameter(torch.full((WIDTH,), 8.0))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor, places: Tensor) -> Tensor:
        """Return the logits of the next byte."""
        x = self.token(text) + self.offset
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = mlp(mixer(x, places))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Pairs(nn.Module):
    """Embeds both sides of pairs; the embeddings have a large offset in common."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)
        self.blocks = nn.Sequential(Mlp(), Mlp())
        self.head = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.head.bias, 6.0)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the negated squared distance of each left to each right one."""
        x = self.head(self.blocks(self.left(standardized(left))))
        y = self.head(self.blocks(self.right(standardized(right))))
        squares = (x * x).sum(-1)[:, None] + (y * y).sum(-1)[None, :]
        return -(squares - 2 * x @ y.T)  # type: ignore[no-any-return]


def standardized(x: Tensor) -> Tensor:
    """Return x with mean 0 and variance 1."""
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / (variance.clamp_min(0) + 1e-3).sqrt()


def text_batches(times: int = 1) -> Iterator[Pair]:
    """Yield windows of a text, and the same one byte later."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(COUNT):
        starts = torch.randint(len(TEXT) - CONTEXT, (times * BATCH, 1), generator=generator)
        windows = TEXT[starts + torch.arange(CONTEXT + 1)].long()
        yield windows[:, :-1], windows[:, 1:]


def pixel_batches(times: int = 1) -> Iterator[Pair]:
    """Yield faint stripes on bright images, and their direction."""
    generator = torch.Generator().manual_seed(0)
    line = torch.arange(8.0)
    for _ in range(COUNT):
        y = torch.randint(8, (2 * times * BATCH,), generator=generator)
        angle = (y * math.pi / 8)[:, None, None]
        stripes = torch.sin(angle.cos() * line[None, :, None] + angle.sin() * line[None, None])
        noise = torch.randn(2 * times * BATCH, 3, 8, 8, generator=generator)
        yield 180 + 2 * stripes[:, None] + noise, y


def series_batches(times: int = 1) -> Iterator[Pair]:
    """Yield features with the time among them, and a value of about 900 that varies by one."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(8, 1, generator=generator)
    for _ in range(COUNT):
        x = torch.randn(8 * times * BATCH, 8, generator=generator)
        yield x, 900 + 50 * x[:, 0] + torch.sin(x @ weights)[:, 0]


def price_batches(times: int = 1) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield windows of prices about 4000 with three seasons, the times they were paid at, and what follows."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(COUNT):
        start = torch.randint(3000, (4 * times * BATCH, 1), generator=generator)
        time = (start + torch.arange(2 * CONTEXT)).float()
        level = 4000 + 10 * torch.randn(len(time), 1, generator=generator)
        season = 4 * (time * math.pi / 4).sin() + 3 * (time * math.pi / 7).cos() + 2 * (time * math.pi / 12).sin()
        price = level + season + 0.1 * torch.randn(time.shape, generator=generator)
        yield price[:, :CONTEXT], time[:, :CONTEXT], price[:, CONTEXT:]


def long_text_batches(times: int = 1) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield long windows of a text, the places of their bytes in it, and the same one byte later."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(COUNT):
        starts = torch.randint(len(TEXT) - LONG, (times, 1), generator=generator)
        places = starts + torch.arange(LONG + 1)
        windows = TEXT[places].long()
        yield windows[:, :-1], places[:, :-1].float(), windows[:, 1:]


def pair_batches(times: int = 1) -> Iterator[Pair]:
    """Yield two noisy views of each of some signals about 200."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(COUNT):
        signal = torch.randn(4 * times * BATCH, 16, generator=generator)
        noise = 0.3 * torch.randn(2, *signal.shape, generator=generator)
        yield 200 + signal + noise[0], 200 + signal.roll(3, -1) + noise[1]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the cross entropy; the last of a batch is what is to be found."""
    return F.cross_entropy(model(*batch[:-1]).flatten(0, -2), batch[-1].flatten())


def squared(model: nn.Module, batch: Pair) -> Tensor:
    """Return the mean square of what is left."""
    left = model(batch[0]) - batch[1]
    return (left * left).mean()


def squared_prices(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of a forecast."""
    return (model(batch[0], batch[1]) - batch[2]).square().mean()


def contrastive(model: nn.Module, batch: Pair) -> Tensor:
    """Return by how much others are nearer than the other half of a pair, by a log-sum-exp."""
    logits = model(*batch) / 4
    largest = logits.amax(-1, keepdim=True).detach()
    total = (logits - largest).exp().sum(-1).log() + largest[:, 0]
    return (total - logits.diagonal()).mean()


_PARTS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Iterator[Any]], Callable[..., Tensor]]] = {
    "gpt": (Gpt, text_batches, cross_entropy),
    "conv": (Conv, pixel_batches, cross_entropy),
    "trend": (Trend, series_batches, squared),
    "forecast": (Forecast, price_batches, squared_prices),
    "scan": (Scan, long_text_batches, cross_entropy),
    "pairs": (Pairs, pair_batches, contrastive),
}
NAMES = tuple(_PARTS)


def workload(name: str, times: int = 1) -> Workload:
    """Return a workload, its batches so many times as large."""
    model, batches, loss = _PARTS[name]
    return Workload(
        model=model,
        batches=partial(batches, times),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    )
