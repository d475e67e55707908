"""What is said of one stored tensor in one format, and how a tensor looks after it was stored in a format."""

import math
from collections.abc import Mapping
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
    `exp_avg_sq`. `reason` is one sentence with the number that decided; `numbers` holds all of them. `needs_master`: the
    tensor may be stored low if the optimizer steps on FP32 masters, or rounds stochastically.
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
    fmt = format_named(format_name)
    if not is_scaled(fmt):
        return round_to(tensor, format_name)
    scale = power_of_two_below(fmt.max, float(tensor.abs().max()) if tensor.numel() else 0.0)
    return round_to(tensor * scale, format_name) / scale


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


def frac(part: torch.Tensor, whole: torch.Tensor) -> float:
    """Return which fraction of the elements that are true in `whole` are true in `part` too; 0 if there are none."""
    count = int(whole.sum())
    return int((part & whole).sum()) / count if count else 0.0
