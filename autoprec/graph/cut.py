"""What a cut of the op graph is computed from: the price of every op in FP32 and low, and of every cast."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """What one node of the op graph costs in FP32 and in the low format; all calls of a site follow its format.

    Times are forward and backward together, casts left out; `low_s` is infinite where the node cannot run low.
    `error` is the first-order error of running it low, infinite where it must stay FP32. Bytes are those saved for the
    backward pass. FP8 is an attribute of a matmul-like site that is low.
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
    """What it takes to cast one tensor once, and its gradient back. *Units*: seconds."""

    down_s: float
    up_s: float
