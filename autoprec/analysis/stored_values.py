"""What is said of one stored tensor in one format, and how a tensor looks after it was stored in a format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from autoprec.numerics import Format, format_named
from autoprec.runtime.rounding import round_to

StoredVerdict: TypeAlias = Literal["fine", "needs_master", "needs_fp32"]

# From harmless to harmful; the worst of several counts.
STORED_VERDICTS: tuple[StoredVerdict, ...] = ("fine", "needs_master", "needs_fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFault:
    """What storing `name` in `format` was measured to do.

    `part` is `parameters`, `gradients`, `buffers`, `ema`, or the optimizer's name for a part of its state, such as
    `exp_avg_sq`. `reason` is one sentence with the number that decided; `numbers` holds all of them, the
    deciding one first. `needs_master`: the tensor may be stored low if the optimizer steps on FP32 masters, or rounds
    stochastically.
    """

    part: str
    name: str
    format: str
    verdict: StoredVerdict
    reason: str
    numbers: Mapping[str, float]


def stored(tensor: torch.Tensor, format_name: str) -> torch.Tensor:
    """Return an FP32 tensor as it comes back out of storage in a format.

    FP8 is stored with one scale a tensor, the largest power of two that keeps it in range, as everybody stores it.
    """
    scale = scale_of(tensor, format_name)
    return round_to(tensor, format_name) if scale == 1 else round_to(tensor * scale, format_name) / scale


def scale_of(tensor: torch.Tensor, format_name: str) -> float:
    """Return the scale that a tensor is stored with in a format: 1 in all but FP8."""
    fmt = format_named(format_name)
    if not is_scaled(fmt) or tensor.numel() == 0:
        return 1.0
    return power_of_two_below(fmt.max, float(tensor.abs().max()))


def stored_each(flat: torch.Tensor, sizes: Sequence[int], format_name: str) -> torch.Tensor:
    """Return what `stored` makes of each of the tensors that lie side by side in `flat`."""
    if not is_scaled(format_named(format_name)):
        return stored(flat, format_name)
    return torch.cat([stored(part, format_name) for part in flat.split(list(sizes))])


def is_scaled(fmt: Format) -> bool:
    """Return whether tensors in the format carry a scale of their own: the 8 bit ones, whose range is too small."""
    return fmt.storage_bits <= 8


def power_of_two_below(limit: float, max_abs: float) -> float:
    """Return the largest power of two, within 2**-120 and 2**120, that keeps `max_abs` times it within `limit`."""
    if max_abs == 0 or not math.isfinite(max_abs):
        return 1.0
    exponent = math.frexp(limit / max_abs)[1] - 1
    return math.ldexp(1.0, max(-120, min(exponent, 120)))


def relative_error(found: torch.Tensor, wanted: torch.Tensor, unit: torch.Tensor | None = None) -> float:
    """Return the norm of the difference over the norm of `unit`, which is `wanted` if left out.

    Infinite where `found` is not finite although `wanted` is; zero where both are the same.
    """
    difference = (found.double() - wanted.double()).norm().item()
    size = (wanted if unit is None else unit).double().norm().item()
    if not math.isfinite(difference):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf


def percent(fraction: float) -> str:
    """Return a fraction in words of at most 7 letters: 0%, <1%, 42%, >99%, 100%, 25 times."""
    if fraction >= 10:
        return f"{fraction:.2g} times" if fraction < 1000 else f"{fraction:.0e} times"
    if 0 < fraction < 0.01:
        return "<1%"
    if 0.99 < fraction < 1:
        return ">99%"
    return f"{fraction:.0%}"


def frac(part: torch.Tensor, whole: torch.Tensor) -> float:
    """Return which fraction of the elements that are true in `whole` are true in `part` too; 0 if there are none."""
    count = int(whole.sum())
    return int((part & whole).sum()) / count if count else 0.0
