"""What an assignment of precisions to sites is made of, and what it costs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from autoprec.graph.site import Site

Precision: TypeAlias = Literal["fp32", "low", "fp8"]
Assignment: TypeAlias = Mapping[Site, Precision]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """What one node of the op graph costs; all calls of a site follow the site's format.

    Seconds are those of forward and backward without casts, infinite where the call cannot run in the format. Errors
    are first order, at least 0, additive over sites, in a unit of the caller's; infinite: the site must stay FP32.
    Bytes are those saved for backward. `fp8_s` and `fp8_error` are for matmuls, which save `low_bytes` there too.
    """

    fp32_s: float
    low_s: float
    error: float = 0.0
    fp32_bytes: int = 0
    low_bytes: int = 0
    fp8_s: float = math.inf
    fp8_error: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class CastCost:
    """What it takes to cast one tensor once, to the low format or to FP32, and its gradient back.

    All calls that read the tensor share the cast; without `shared` each of them pays for its own.
    """

    down_s: float
    up_s: float
    shared: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What an assignment is predicted to cost in one step."""

    time_s: float
    error: float
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """An assignment that is optimal for a price of error, in seconds per unit of error."""

    assignment: Assignment
    predicted: Prediction
    error_price: float


def dominates(one: Prediction, other: Prediction) -> bool:
    """Return whether `one` is in nothing worse than `other`, and better in something."""
    pairs = [(one.time_s, other.time_s), (one.error, other.error), (one.bytes, other.bytes)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def undominated(plans: Iterable[Planned]) -> tuple[Planned, ...]:
    """Return the plans that no other dominates, the first of equals, by time: the Pareto front of several sweeps."""
    front: list[Planned] = []
    for plan in sorted(plans, key=lambda each: (each.predicted.time_s, each.predicted.error, each.predicted.bytes)):
        if not any(each.predicted == plan.predicted or dominates(each.predicted, plan.predicted) for each in front):
            front.append(plan)
    return tuple(front)
