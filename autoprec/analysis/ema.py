"""Moving averages of weights: copies that a model keeps, and which decay still moves one in a low format."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from autoprec.analysis.short_run import BufferRun, ParameterRun, ShortRun
from autoprec.analysis.stored_values import StoredFault, frac, percent, stored
from autoprec.capture.memory import named_tensors
from autoprec.numerics import format_named

DECAYS = (0.9, 0.99, 0.999, 0.9999)
# So many elements of each parameter tell of averages in general.
_NUM_ELEMENTS = 256
# An average that loses more than this fraction of its updates does not follow.
SWAMPED_FRAC = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightAverage:
    """Tensors under `prefix` that start as copies of parameters under `source`; `pairs` maps their names.

    `decay` is what is kept of the copy in an update: asked of its averaging function, or seen in the forward passes;
    None if neither tells.
    """

    prefix: str
    source: str
    decay: float | None
    pairs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageMoves:
    """Whether an average with `decay` moves if stored in `format`.

    `lost_update_frac`: of the first updates of an average of this run's weights, those that change nothing.
    `needed_difference`: by how much of itself weight and average must differ at most (just above a power of two) for
    an update to be kept, half a spacing over 1 - decay.
    """

    decay: float
    format: str
    lost_update_frac: float
    needed_difference: float


def average_moves(run: ShortRun, formats: Sequence[str]) -> tuple[AverageMoves, ...]:
    """Return for usual decays whether averages of the run's weights move in each format; nothing if no step was taken.

    An average lags behind by update / (1 - decay), so that it comes to move by as much as the weights do: what
    cannot store the weights' updates cannot store their average's.
    """
    if run.num_steps == 0 or not run.parameters:
        return ()
    values = [torch.cat(each) for each in zip(*(_some_values(each) for each in run.parameters), strict=True)]
    return tuple(
        AverageMoves(
            decay=decay,
            format=name,
            lost_update_frac=frac(*_average(values, decay, name)),
            needed_difference=format_named(name).unit_roundoff / (1 - decay),
        )
        for decay in DECAYS
        for name in formats
    )


def weight_averages(model: nn.Module, buffers: Sequence[BufferRun]) -> tuple[WeightAverage, ...]:
    """Return the averages that a fresh `model` holds: `AveragedModel`s, and untrained copies that its forward moves."""
    averaged = {path: each for path, each in model.named_modules() if isinstance(each, AveragedModel)}
    moved = {each.name for each in buffers}
    named = named_tensors(model)
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name, tensor in named.items():
        inside = next((path for path in averaged if name.startswith(f"{path}.")), None)
        if (inside is not None or (name in moved and not tensor.requires_grad)) and tensor.numel() > 1:
            source = _source(name, tensor, named, averaged)
            if source is not None:
                groups.setdefault(_prefixes(name, source), {})[name] = source
    return tuple(
        WeightAverage(
            prefix=prefix, source=source, pairs=pairs,
            decay=next((_decay(each) for path, each in averaged.items() if prefix.startswith(path)), None)
            or _seen_decay(buffers, pairs),
        )
        for (prefix, source), pairs in groups.items()
    )  # fmt: skip


def average_faults(run: ShortRun, averages: Sequence[WeightAverage], formats: Sequence[str]) -> Iterator[StoredFault]:
    """Yield what storing each average of the model low does to its first updates, where its decay is known."""
    by_name = {each.name: each.values for each in run.parameters}
    for average in averages:
        for copy, source in average.pairs.items():
            if average.decay is None or source not in by_name or run.num_steps == 0:
                continue
            for name in formats:
                stays, moved = _average(by_name[source], average.decay, name)
                lost = frac(stays, moved)
                yield StoredFault(
                    part="ema", name=copy, format=name, verdict="needs_fp32" if lost > SWAMPED_FRAC else "fine",
                    reason=f"with decay {average.decay:.6g}, {percent(lost)} of its updates are below half a spacing "
                    f"of {name} and change nothing",
                    numbers={"decay": average.decay, "lost_update_frac": lost},
                )  # fmt: skip


def _some_values(run: ParameterRun) -> list[torch.Tensor]:
    return [each[:_NUM_ELEMENTS] for each in run.values]


def _average(values: Sequence[torch.Tensor], decay: float, format_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which updates of an average of `values` change nothing, and which do in FP32."""
    exact, low = values[0], stored(values[0], format_name)
    stays, moved = [], []
    for value in values[1:]:
        update = (1 - decay) * (value - exact)
        exact = exact + update
        new = stored(low + update, format_name)
        stays.append(new == low)
        moved.append(update != 0)
        low = new
    return torch.stack(stays), torch.stack(moved)


def _source(
    name: str, tensor: torch.Tensor, named: Mapping[str, torch.Tensor], averaged: Mapping[str, nn.Module]
) -> str | None:
    """Return the trained parameter that `tensor` is a copy of: the one whose name shares the most at its end."""
    equals = [
        other
        for other, value in named.items()
        if value.requires_grad
        and value is not tensor
        and not any(other.startswith(f"{path}.") for path in averaged)
        and value.shape == tensor.shape
        and torch.equal(value.detach(), tensor.detach())
    ]
    best = max(equals, key=lambda other: len(_shared_end(name, other)), default=None)
    return best if best is not None and _shared_end(name, best) else None


def _shared_end(one: str, other: str) -> list[str]:
    shared: list[str] = []
    for a, b in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if a != b:
            break
        shared.append(a)
    return shared


def _prefixes(copy: str, source: str) -> tuple[str, str]:
    shared = len(_shared_end(copy, source))
    return ".".join(copy.split(".")[:-shared]), ".".join(source.split(".")[:-shared])


def _decay(model: nn.Module) -> float | None:
    """Return what the averaging function of an `AveragedModel` keeps of an average that was updated often."""
    count = torch.tensor(1_000_000)
    average, weight = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for name in ("multi_avg_fn", "avg_fn"):
        function = getattr(model, name, None)
        if function is None:
            continue
        if name == "multi_avg_fn":
            function([average], [weight], count)
            return float(average)
        return float(function(average, weight, count).item())
    return None


def _seen_decay(buffers: Sequence[BufferRun], pairs: Mapping[str, str]) -> float | None:
    decays = [each.decay for each in buffers if each.name in pairs and each.decay is not None]
    return sorted(decays)[len(decays) // 2] if decays else None
