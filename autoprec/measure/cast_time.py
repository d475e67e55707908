"""Times of casts as a function of size and layout, measured at a handful of sizes and interpolated."""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from autoprec.measure.op_call import IsolatedCall
from autoprec.measure.paired import Limits, MakeBlock, Timing, paired_times
from autoprec.measure.step_time import Clock
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.weight_casts import to_dtype

Direction: TypeAlias = Literal["down", "up"]
Layout: TypeAlias = Literal["dense", "strided"]

DIRECTIONS: tuple[Direction, ...] = ("down", "up")
LAYOUTS: tuple[Layout, ...] = ("dense", "strided")
SIZES = (2**6, 2**10, 2**13, 2**16, 2**18, 2**20, 2**22)
_CHUNK = 64  # elements that lie together in a strided tensor, as those of an attention head


@dataclass(frozen=True, kw_only=True, slots=True)
class CastTime:
    """Seconds to cast `numel` elements, and to cast their gradient back."""

    numel: int
    forward_s: float
    backward_s: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CastTimes:
    """Times of casts between FP32 and low formats; `points` maps `key(...)` to those measured, by rising size."""

    points: Mapping[str, Sequence[CastTime]] = field(default_factory=dict)

    def seconds(
        self, fmt: str, direction: Direction, numel: int, *, layout: Layout = "dense", grad: bool = True
    ) -> float:
        """Return the time of one cast, with that of its gradient if it has one.

        Linear between the two sizes around `numel`; beyond the largest one, in proportion to it; never below the time
        of the smallest one. Zero for a tensor without elements.
        """
        if numel == 0:
            return 0.0
        points = self.points[key(fmt, direction, layout)]
        sizes = [point.numel for point in points]
        times = [point.forward_s + (point.backward_s if grad else 0.0) for point in points]
        at = bisect.bisect_left(sizes, numel)
        if at == 0:
            return times[0]
        if at == len(sizes):
            return times[-1] * numel / sizes[-1]
        share = (numel - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])


def key(fmt: str, direction: str, layout: str) -> str:
    """Return the key of `CastTimes.points` for casts down to a low format, or up from it."""
    return f"{fmt} {direction} {layout}"


def sizes_up_to(numel: int) -> tuple[int, ...]:
    """Return the sizes to measure so that `numel` elements lie between two of them, as far as they go."""
    last = min(bisect.bisect_left(SIZES, numel), len(SIZES) - 1)
    return SIZES[: last + 1]


def measure_casts(
    formats: Sequence[str],
    sizes: Sequence[int],
    *,
    device: str,
    clock: Clock,
    limits: Limits,
    allowance_s: float,
    backward_call_s: float = 0.0,
) -> Mapping[str, tuple[CastTime, ...]]:
    """Return the points of `CastTimes` for the low `formats` at some `sizes`.

    Both directions of a size are measured in the same rounds, for about `allowance_s`.
    """
    found: dict[str, list[CastTime]] = {}
    for size, layout, fmt in itertools.product(sizes, LAYOUTS, formats):
        makers: dict[str, MakeBlock] = {way: _call(fmt, way, size, layout, device).block for way in DIRECTIONS}
        times = paired_times(
            makers, clock=clock, allowance_s=allowance_s, limits=limits, backward_call_s=backward_call_s
        )
        for way, timing in times.items():
            found.setdefault(key(fmt, way, layout), []).append(_point(size, timing))
    return {name: tuple(points) for name, points in found.items()}


def _point(size: int, timing: Timing) -> CastTime:
    return CastTime(
        numel=size, forward_s=timing.forward_s, backward_s=timing.backward_s, spread=round(timing.spread, 4)
    )


def _call(fmt: str, direction: Direction, numel: int, layout: Layout, device: str) -> IsolatedCall:
    low = torch_dtype(fmt)
    given, wanted = (torch.float32, low) if direction == "down" else (low, torch.float32)
    if layout == "strided":
        values = torch.randn(numel // _CHUNK, 3 * _CHUNK, device=device)[:, :_CHUNK]
    else:
        values = torch.randn(numel, device=device)
    values = values.to(given).requires_grad_()
    with torch.enable_grad():
        return IsolatedCall(lambda tensor: to_dtype(tensor, wanted), ((values,), {}))
