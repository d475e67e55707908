"""Distances between the numbers of a format, and additions that get lost in them."""

import math
from fractions import Fraction

from autoprec.numerics.formats import Format
from autoprec.numerics.rounding import round_scalar


def ulp(x: float, fmt: Format) -> float:
    """Return the gap between the numbers of `fmt` in the binade of `x`: one unit in the last place.

    At a power of two it is the gap above; below `fmt.min_normal` it is `fmt.min_subnormal`; beyond `fmt.max` it goes
    on growing as if the exponent had no limit. Infinity gives infinity, NaN gives NaN.
    Source: Muller et al. 2018, Handbook of Floating-Point Arithmetic, section 2.3.2 (Goldberg's ulp).
    """
    if not math.isfinite(x):
        return abs(x)
    exponent = math.frexp(x)[1] - 1 if x else fmt.min_exponent
    return math.ldexp(1.0, max(exponent, fmt.min_exponent) - fmt.mantissa_bits)


def next_up(x: float, fmt: Format) -> float:
    """Return the smallest number of `fmt` above `x`, which need not be a number of `fmt` itself.

    Above `fmt.max` that is infinity, or NaN in a format without infinity; NaN gives NaN.
    """
    if math.isnan(x):
        return math.nan
    if x == -math.inf:
        return -fmt.max
    if x >= fmt.max:
        return math.inf if fmt.has_infinity else math.nan
    if x < 0:
        return -_just_below(-x, fmt)
    down = round_scalar(x, fmt, mode="toward_zero")
    return float(Fraction(down) + Fraction(ulp(down, fmt)))


def next_down(x: float, fmt: Format) -> float:
    """Return the largest number of `fmt` below `x`; the mirror image of `next_up`."""
    return -next_up(-x, fmt)


def is_swamped(addend: float, total: float, fmt: Format) -> bool:
    """Return whether adding `addend` to `total` in `fmt` changes nothing although `addend` is not zero.

    `total` is first rounded to `fmt`; the sum is formed exactly and rounded once, to nearest. So an addend of exactly
    half an ulp is lost where `total` is even: 256 + 1 in bf16. Never true if either is infinite or NaN.
    """
    start = round_scalar(total, fmt)
    if addend == 0 or not (math.isfinite(addend) and math.isfinite(start)):
        return False
    return round_scalar(Fraction(start) + Fraction(addend), fmt) == start


def _just_below(magnitude: float, fmt: Format) -> float:
    """Return the largest number of `fmt` below `magnitude`, which is positive."""
    down = round_scalar(magnitude, fmt, mode="toward_zero")
    if down < magnitude:
        return down
    gap = Fraction(ulp(down, fmt))
    is_power_of_two = math.frexp(down)[0] == 0.5
    return float(Fraction(down) - (gap / 2 if is_power_of_two and down > fmt.min_normal else gap))
