"""Workloads, sound candidates and planted faults of benchmarks/fidelity.py.

Many seeds train at once: every tensor has the seed as its first dimension, and no op mixes seeds, so a thousand runs
take minutes. Whether a candidate loses steps is for the benchmark to find out: what is planted here as a fault may turn
out to be harmless on a workload. Low formats are rounded to and computed on in FP32, so any machine tells the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from autoprec.workload.seeding import mixed

Tensors: TypeAlias = dict[str, torch.Tensor]
Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
TEXT = (Path(__file__).parents[1] / "LICENSE").read_bytes()
_CLASSES, _LENGTH, _WIDTH, _HIDDEN = 8, 16, 32, 16


def _nothing(*_: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """How training is changed; `is_fault` says what it was meant to be.

    `start` edits initial weights (name, tensor, generator); `gradient` returns what becomes of a gradient (name,
    tensor); `group` overwrites fields of the optimizer's group, numbers in `times` multiply them; `after` edits weights
    and optimizer state after each step. A step goes `update` of its way. `low` rounds like autocast with bf16, `split`
    sums matmuls in another order.
    """

    name: str
    is_fault: bool
    start: Callable[[str, torch.Tensor, torch.Generator], None] = _nothing
    gradient: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    group: tuple[tuple[str, float], ...] = ()
    times: tuple[tuple[str, float], ...] = ()
    after: Callable[[torch.Tensor, Any], None] = _nothing
    update: float = 1.0
    low: bool = False
    split: bool = False
    dropout: bool = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload: weights of one seed, a batch of one seed, and the losses of all seeds."""

    shapes: dict[str, tuple[int, ...]]
    batch: Callable[[torch.Generator], Batch]
    losses: Callable[[Tensors, Batch, Candidate], torch.Tensor]
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]

    def weights(self, seed: int) -> Tensors:
        """Return the initial weights of `seed`."""
        generator = torch.Generator().manual_seed(mixed(seed, 1))
        return {name: _initial(name, shape, generator) for name, shape in self.shapes.items()}

    def batches(self, seed: int, count: int) -> list[Batch]:
        """Return the batches of `seed`, which no other seed has."""
        generator = torch.Generator().manual_seed(mixed(seed, 2))
        return [self.batch(generator) for _ in range(count)]


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.w"):
        return torch.ones(shape)
    if name.endswith(".b"):
        return torch.zeros(shape)
    return torch.randn(shape, generator=generator) / (1.0 if name.endswith("embedding") else shape[0] ** 0.5)


def linear(x: torch.Tensor, p: Tensors, name: str, how: Candidate) -> torch.Tensor:
    """Return x @ w + b for each seed; x has the shape (seeds, rows, inputs)."""
    w, b = p[f"{name}.w"], p[f"{name}.b"].unsqueeze(1)
    if how.low:
        x, w, b = (each.bfloat16().float() for each in (x, w, b))
    if how.split:
        half = w.shape[1] // 2
        return x[..., half:] @ w[:, half:] + (x[..., :half] @ w[:, :half] + b)
    y = torch.baddbmm(b, x, w)
    return y.bfloat16().float() if how.low else y


def layer_norm(x: torch.Tensor, p: Tensors, name: str) -> torch.Tensor:
    """Return the layer norm over the last dimension."""
    return F.layer_norm(x, x.shape[-1:]) * p[f"{name}_norm.w"].unsqueeze(1) + p[f"{name}_norm.b"].unsqueeze(1)


def batch_norm(x: torch.Tensor, p: Tensors, name: str) -> torch.Tensor:
    """Return the batch norm over the rows."""
    centered = x - x.mean(1, keepdim=True)
    scale = torch.rsqrt(centered.square().mean(1, keepdim=True) + 1e-5)
    return centered * scale * p[f"{name}_norm.w"].unsqueeze(1) + p[f"{name}_norm.b"].unsqueeze(1)


def cross_entropy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean over rows for each seed."""
    return F.cross_entropy(scores.transpose(1, 2), y.flatten(1), reduction="none").mean(1)


def mlp(p: Tensors, batch: Batch, how: Candidate) -> torch.Tensor:
    """Return the losses of a classifier with layer norm and dropout."""
    h = F.gelu(layer_norm(linear(batch[0], p, "first", how), p, "first"))
    h = F.dropout(h, 0.1, training=how.dropout)
    return cross_entropy(linear(F.gelu(linear(h, p, "middle", how)), p, "head", how), batch[1])


def cnn(p: Tensors, batch: Batch, how: Candidate) -> torch.Tensor:
    """Return the losses of two convolutions with batch norm."""
    x, y = batch
    seeds, rows = x.shape[:2]
    h = F.unfold(x.flatten(0, 1), 3, padding=1).transpose(1, 2).reshape(seeds, rows * 64, 27)
    h = F.relu(batch_norm(linear(h, p, "first", how), p, "first"))
    h = h.reshape(seeds * rows, 8, 8, 8).permute(0, 3, 1, 2)
    h = F.unfold(h, 3, padding=1, stride=2).transpose(1, 2).reshape(seeds, rows * 16, 72)
    h = F.relu(batch_norm(linear(h, p, "middle", how), p, "middle"))
    return cross_entropy(linear(h.reshape(seeds, rows, 16, 16).mean(2), p, "head", how), y)


def gpt(p: Tensors, batch: Batch, how: Candidate) -> torch.Tensor:
    """Return the losses of a byte-level transformer of one block."""
    x, y = batch
    seeds, rows = x.shape[:2]
    tokens = torch.take_along_dim(p["embedding"], x.flatten(1).unsqueeze(2), 1)
    h = (tokens.reshape(seeds, rows, _LENGTH, _WIDTH) + p["place_embedding"].unsqueeze(1)).flatten(1, 2)
    heads = linear(layer_norm(h, p, "attention"), p, "attention", how).reshape(seeds * rows, _LENGTH, 3, 2, 16)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(torch.ones(_LENGTH, _LENGTH).triu(1).bool(), -torch.inf)
    mixed_up = (scores.softmax(-1) @ v).transpose(1, 2).reshape(seeds, rows * _LENGTH, _WIDTH)
    h = h + F.dropout(linear(mixed_up, p, "out", how), 0.05, training=how.dropout)
    hidden = F.gelu(linear(layer_norm(h, p, "up"), p, "up", how))
    h = h + F.dropout(linear(hidden, p, "middle", how), 0.05, training=how.dropout)
    return cross_entropy(linear(layer_norm(h, p, "last"), p, "head", how), y)


def gru(p: Tensors, batch: Batch, how: Candidate) -> torch.Tensor:
    """Return the losses of a recurrent reader with a layer norm on its last state."""
    x, y = batch
    state = x.new_zeros(*x.shape[:2], _HIDDEN)
    for step in range(x.shape[2]):
        now = torch.cat([x[:, :, step], state], 2)
        keep, reset = torch.sigmoid(linear(now, p, "gates", how)).chunk(2, -1)
        new = torch.tanh(linear(torch.cat([x[:, :, step], reset * state], 2), p, "middle", how))
        state = keep * state + (1 - keep) * new
    return (linear(layer_norm(state, p, "last"), p, "head", how) - y).square().mean((1, 2))


def _fixed(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


_TEACHER, _TEMPLATES, _READER = _fixed(16, _CLASSES), _fixed(_CLASSES, 3, 8, 8), _fixed(4)


def classify(generator: torch.Generator) -> Batch:
    """Return points and the classes that a fixed teacher gives them, with noise."""
    x = torch.randn(64, 16, generator=generator)
    noise = 0.3 * torch.randn(64, _CLASSES, generator=generator)
    return x, (torch.sin(1.5 * x) @ _TEACHER + noise).argmax(1)


def images(generator: torch.Generator) -> Batch:
    """Return noisy copies of one template a class."""
    y = torch.randint(_CLASSES, (8,), generator=generator)
    return _TEMPLATES[y] + 2.0 * torch.randn(8, 3, 8, 8, generator=generator), y


def text(generator: torch.Generator) -> Batch:
    """Return pieces of a text and their next bytes."""
    at = torch.randint(len(TEXT) - _LENGTH - 1, (4,), generator=generator)
    piece = torch.tensor([list(TEXT[i : i + _LENGTH + 1]) for i in at.tolist()])
    return piece[:, :-1], piece[:, 1:]


def sequences(generator: torch.Generator) -> Batch:
    """Return sequences and a fading sum over them."""
    x = torch.randn(32, 8, 4, generator=generator)
    return x, 2 * torch.tanh((x @ _READER) @ 0.8 ** torch.arange(8.0).flip(0)).unsqueeze(1) + 1


def _layer(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.w": (inputs, outputs), f"{name}.b": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}_norm.w": (width,), f"{name}_norm.b": (width,)}


def _adamw(lr: float) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    return lambda weights: torch.optim.AdamW(weights, lr=lr, weight_decay=0.1)


def _sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.03, momentum=0.9, weight_decay=1e-3)


CASES = {
    "mlp": Case(
        shapes=_layer("first", 16, 32) | _norm("first", 32) | _layer("middle", 32, 32) | _layer("head", 32, _CLASSES),
        batch=classify,
        losses=mlp,
        optimizer=_adamw(3e-3),
    ),
    "cnn": Case(
        shapes=_layer("first", 27, 8) | _norm("first", 8) | _layer("middle", 72, 16) | _norm("middle", 16)
        | _layer("head", 16, _CLASSES),
        batch=images,
        losses=cnn,
        optimizer=_sgd,
    ),
    "gpt": Case(
        shapes={"embedding": (128, _WIDTH), "place_embedding": (_LENGTH, _WIDTH)} | _norm("attention", _WIDTH)
        | _layer("attention", _WIDTH, 3 * _WIDTH) | _layer("out", _WIDTH, _WIDTH) | _norm("up", _WIDTH)
        | _layer("up", _WIDTH, 2 * _WIDTH) | _layer("middle", 2 * _WIDTH, _WIDTH) | _norm("last", _WIDTH)
        | _layer("head", _WIDTH, 128),
        batch=text,
        losses=gpt,
        optimizer=_adamw(3e-3),
    ),
    "gru": Case(
        shapes=_layer("gates", 4 + _HIDDEN, 2 * _HIDDEN) | _layer("middle", 4 + _HIDDEN, _HIDDEN)
        | _norm("last", _HIDDEN) | _layer("head", _HIDDEN, 1),
        batch=sequences,
        losses=gru,
        optimizer=_adamw(3e-3),
    ),
}  # fmt: skip


def nudge(size: float) -> Callable[[str, torch.Tensor, torch.Generator], None]:
    """Return what multiplies weights by 1 + size N(0, 1)."""
    return lambda _, p, generator: _copy(p, p * (1 + size * torch.randn(p.shape, generator=generator)))


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    into.copy_(values)


def _flushed(exponent: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return what rounds gradients, times 2^exponent, to fp16 and scales them back."""
    return lambda _, g: (g * 2.0**exponent).half().float() / 2.0**exponent


def _short_norm_bias(name: str, g: torch.Tensor) -> torch.Tensor:
    """Lose a fifth of the norm bias gradients, more in some channels than in others."""
    return g * torch.linspace(0.6, 1.0, g.shape[-1]) if name.endswith("norm.b") else g


def _stored(dtype: torch.dtype) -> Callable[[torch.Tensor, Any], None]:
    return lambda p, _: _copy(p, p.to(dtype))


def _state_in_bf16(_: torch.Tensor, state: Any) -> None:
    if "exp_avg_sq" in state:
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())


CHAOS = Candidate(name="chaos", is_fault=False, start=nudge(2.0**-8))
CANDIDATES = (
    Candidate(name="nudged by 1e-7", is_fault=False, start=nudge(1e-7)),
    Candidate(name="nudged by 1e-6", is_fault=False, start=nudge(1e-6)),
    Candidate(name="nudged by one bf16 rounding", is_fault=False, start=nudge(2.0**-8)),
    Candidate(name="weights rounded to bf16 once", is_fault=False, start=lambda _, p, __: _copy(p, p.bfloat16())),
    Candidate(name="sums in another order", is_fault=False, split=True),
    Candidate(name="autocast bf16", is_fault=False, low=True),
    Candidate(name="bf16 weights without masters", is_fault=True, after=_stored(torch.bfloat16)),
    Candidate(name="fp16 weights without masters", is_fault=True, after=_stored(torch.float16)),
    Candidate(name="e4m3 weights without masters", is_fault=True, after=_stored(torch.float8_e4m3fn)),
    Candidate(name="updates scaled by 0.9", is_fault=True, update=0.9),  # the same as a learning rate 10 % low
    Candidate(name="learning rate 5 % low", is_fault=True, times=(("lr", 0.95),)),
    Candidate(name="learning rate 5 % high", is_fault=True, times=(("lr", 1.05),)),
    Candidate(name="learning rate 10 % high", is_fault=True, times=(("lr", 1.1),)),
    Candidate(name="fp16 gradients of a loss 2^-12 small", is_fault=True, gradient=_flushed(-12)),
    Candidate(name="fp16 gradients of a loss 2^-16 small", is_fault=True, gradient=_flushed(-16)),
    Candidate(name="fp16 gradients of a loss 2^-20 small", is_fault=True, gradient=_flushed(-20)),
    Candidate(name="norm bias gradient a fifth short", is_fault=True, gradient=_short_norm_bias),
    Candidate(name="second moment in bf16", is_fault=True, after=_state_in_bf16),
    Candidate(name="weight decay lost", is_fault=True, group=(("weight_decay", 0.0),)),
    Candidate(name="one layer frozen", is_fault=True, gradient=lambda n, g: g * (n != "middle.w")),
    Candidate(name="eps 1e-4", is_fault=True, group=(("eps", 1e-4),)),
    Candidate(name="eps 1e-3", is_fault=True, group=(("eps", 1e-3),)),
    Candidate(name="dropout off", is_fault=True, dropout=False),
)
