"""Rounding to a format, one number at a time, written to be checked against the definition and not to be fast."""

import math
from fractions import Fraction
from typing import Literal, TypeAlias, assert_never

from autoprec.errors import FormatError
from autoprec.numerics.formats import Format

RoundingMode: TypeAlias = Literal["nearest", "toward_zero", "stochastic"]


def round_scalar(
    x: float | Fraction,
    fmt: Format,
    *,
    mode: RoundingMode = "nearest",
    saturate: bool = False,
    uniform: float | None = None,
) -> float:
    """Return `x` rounded to a number of `fmt`.

    Rounds as if the exponent had no upper limit, then looks whether the result is beyond `fmt.max`. If so it is an
    overflow: infinity, or NaN in a format without infinity, or `fmt.max` with `saturate`. `toward_zero` takes a finite
    number no further than `fmt.max`. Ties of `nearest` go to the even significand. `stochastic` rounds away from zero
    if `uniform`, a draw from [0, 1), is below the fraction of the gap that `x` lies beyond its neighbor nearer to zero.
    NaN stays NaN, zeros keep their sign, subnormals are kept; an infinite `x` is an overflow in every mode.
    Raises: `FormatError` if `uniform` is given for another mode than `stochastic`, or is missing for that.
    Source: IEEE 754-2019, sections 4.3 and 7.4; OFP8 revision 1.0 for overflow without infinity and saturation;
    Croci et al. 2022, Stochastic rounding: implementation, error analysis and applications, section 2.
    """
    if (mode == "stochastic") != (uniform is not None):
        raise FormatError(f"mode {mode!r} with uniform={uniform}; give uniform in [0, 1) with mode 'stochastic' only")
    if isinstance(x, float) and math.isnan(x):
        return math.nan
    negative = math.copysign(1.0, x) < 0
    if isinstance(x, float) and math.isinf(x):
        return _signed(_overflow(fmt, saturate=saturate), negative=negative)

    exact = abs(Fraction(x))
    quantum = Fraction(2) ** (max(_floor_log2(exact), fmt.min_exponent) - fmt.mantissa_bits)
    below = exact // quantum
    if _rounds_away(exact / quantum - below, odd=below % 2 == 1, mode=mode, uniform=uniform):
        below += 1
    rounded = below * quantum
    if rounded <= Fraction(fmt.max):
        return _signed(float(rounded), negative=negative)
    return _signed(fmt.max if mode == "toward_zero" else _overflow(fmt, saturate=saturate), negative=negative)


def _rounds_away(fraction: Fraction, *, odd: bool, mode: RoundingMode, uniform: float | None) -> bool:
    """Return whether a number `fraction` of a gap beyond its neighbor nearer to zero rounds away from it."""
    if mode == "nearest":
        half = Fraction(1, 2)
        return fraction > half or (fraction == half and odd)
    if mode == "toward_zero":
        return False
    if mode == "stochastic":
        return uniform is not None and uniform < fraction
    assert_never(mode)


def _overflow(fmt: Format, *, saturate: bool) -> float:
    """Return what stands for a magnitude beyond the largest number of `fmt`."""
    if saturate:
        return fmt.max
    return math.inf if fmt.has_infinity else math.nan


def _signed(magnitude: float, *, negative: bool) -> float:
    return -magnitude if negative else magnitude


def _floor_log2(x: Fraction) -> int:
    """Return the largest k with 2**k <= x; for zero, a k below every format's."""
    if x == 0:
        return -(2**30)
    estimate = x.numerator.bit_length() - x.denominator.bit_length()
    return estimate if Fraction(2) ** estimate <= x else estimate - 1
