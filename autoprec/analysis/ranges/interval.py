"""Intervals of extended real numbers, and how the dtype of a result widens them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoprec.numerics import FORMATS, Format

INF = math.inf
_SINGLE = 2.0**-6  # twice the spacing of bf16, the coarsest dtype that numbers of a script are rounded to


@dataclass(frozen=True, slots=True)
class Interval:
    """All numbers that the elements of a tensor can be, infinities too; NaN lies in no interval and in no way counts.

    `is_integer`: all elements are integers. `is_number`: none is NaN. `is_tight`: elements reach both ends, but for
    rounding, whatever the data.
    """

    lo: float = -INF
    hi: float = INF
    is_integer: bool = False
    is_number: bool = False
    is_tight: bool = False

    @property
    def magnitude(self) -> float:
        """Return the largest magnitude."""
        return max(-self.lo, self.hi)

    @property
    def is_finite(self) -> bool:
        """Return whether both ends are finite."""
        return self.lo > -INF and self.hi < INF

    @property
    def contains_zero(self) -> bool:
        """Return whether an element may be zero."""
        return self.lo <= 0 <= self.hi

    @property
    def smallest_nonzero(self) -> float:
        """Return a lower bound on the magnitude of what is not zero: 1 for integers, 0 if there is none."""
        if not self.contains_zero:
            return min(abs(self.lo), abs(self.hi))
        return 1.0 if self.is_integer else 0.0

    @property
    def is_single(self) -> bool:
        """Return whether all elements are one number, but for rounding."""
        return self.is_tight and self.hi - self.lo <= _SINGLE * self.magnitude

    def contains(self, value: float) -> bool:
        """Return whether an element may be `value`."""
        return self.lo <= value <= self.hi

    def loose(self) -> "Interval":
        """Return the interval of any part of the elements, which need not reach the ends."""
        return Interval(self.lo, self.hi, self.is_integer, self.is_number) if self.is_tight else self


TOP = Interval()


def point(value: float) -> Interval:
    """Return the interval of one number; anything for NaN."""
    if math.isnan(value):
        return TOP
    return Interval(value, value, float(value).is_integer(), is_number=True, is_tight=True)


def hull(intervals: Iterable[Interval]) -> Interval:
    """Return the smallest interval that holds all of `intervals`, each of which has elements; the top for none."""
    every = tuple(intervals)
    if len(every) < 2:
        return every[0] if every else TOP
    return Interval(
        min(each.lo for each in every),
        max(each.hi for each in every),
        is_integer=all(each.is_integer for each in every),
        is_number=all(each.is_number for each in every),
        is_tight=all(each.is_tight for each in every),
    )


def add(a: Interval, b: Interval) -> Interval:
    """Return the interval of sums."""
    tight = a.is_tight and b.is_tight and (a.is_single or b.is_single)
    return Interval(
        _low(a.lo + b.lo), _high(a.hi + b.hi), a.is_integer and b.is_integer, a.is_number and b.is_number, tight
    )


def signed_like(total: Interval, one: Interval) -> Interval:
    """Return `total`, kept to the side of zero that all terms, which lie in `one`, are on."""
    low = max(total.lo, 0.0) if one.lo >= 0 else total.lo
    high = min(total.hi, 0.0) if one.hi <= 0 else total.hi
    return Interval(low, high, total.is_integer, total.is_number, total.is_tight)


def negate(a: Interval) -> Interval:
    """Return the interval of the negated elements."""
    return Interval(-a.hi, -a.lo, a.is_integer, a.is_number, a.is_tight)


def multiply(a: Interval, b: Interval, *, is_outer: bool = False) -> Interval:
    """Return the interval of products; `is_outer`: every element of `a` meets every one of `b`."""
    corners = [_product(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    tight = a.is_tight and b.is_tight and (is_outer or a.is_single or b.is_single)
    return Interval(min(corners), max(corners), a.is_integer and b.is_integer, a.is_number and b.is_number, tight)


def divide(a: Interval, b: Interval) -> Interval:
    """Return the interval of quotients: anything if the divisor may be zero, unless its sign is known."""
    if b.lo < 0 < b.hi or b.lo == b.hi == 0:
        return TOP
    if b.lo == 0 or b.hi == 0:  # a zero of either sign gives either infinity, and 0 / 0 gives NaN
        return TOP
    tight = b.is_single
    inverse = Interval(1 / b.hi, 1 / b.lo, is_number=b.is_number, is_tight=tight)
    return multiply(a, inverse)


def map_monotone(function: Callable[[float], float], a: Interval) -> Interval:
    """Return the interval of a function that never decreases."""
    return Interval(function(a.lo), function(a.hi), is_number=a.is_number, is_tight=a.is_tight)


def clip(a: Interval, lo: float, hi: float) -> Interval:
    """Return the interval of the elements, each moved to the nearest number from `lo` to `hi`."""
    return Interval(min(max(a.lo, lo), hi), max(min(a.hi, hi), lo), a.is_integer, a.is_number, a.is_tight)


def grown(a: Interval, amount: float) -> Interval:
    """Return `a` with both ends moved out by `amount`."""
    if amount == 0:
        return a
    return Interval(_low(a.lo - amount), _high(a.hi + amount), is_number=a.is_number, is_tight=a.is_tight)


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y  # an infinite end stands for numbers without bound: 0 times them is 0


def _low(x: float) -> float:
    return -INF if math.isnan(x) else x


def _high(x: float) -> float:
    return INF if math.isnan(x) else x


# What the dtype of a result does to it.


@dataclass(frozen=True, slots=True)
class _Storage:
    """What a floating dtype can hold, computed once."""

    precision: int
    eps: float
    max: float
    min_normal: float


def _storage(row: Format) -> _Storage:
    return _Storage(row.precision, row.eps, row.max, row.min_normal)


_FLOAT64 = Format(name="float64", exponent_bits=11, mantissa_bits=52, storage_bits=64)
_STORAGE: Mapping[str, _Storage] = MappingProxyType(
    {
        "float32": _storage(FORMATS["fp32"]),
        "bfloat16": _storage(FORMATS["bf16"]),
        "float16": _storage(FORMATS["fp16"]),
        "float8_e4m3fn": _storage(FORMATS["fp8_e4m3"]),
        "float8_e5m2": _storage(FORMATS["fp8_e5m2"]),
        "float64": _storage(_FLOAT64),
    }
)
_INTEGERS: Mapping[str, Interval] = MappingProxyType(
    {
        **{
            f"int{bits}": Interval(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1), is_integer=True, is_number=True)
            for bits in (8, 16, 32, 64)
        },
        **{f"uint{bits}": Interval(0.0, 2.0**bits, is_integer=True, is_number=True) for bits in (8, 16, 32, 64)},
        "bool": Interval(0.0, 1.0, is_integer=True, is_number=True),
    }
)
_LARGEST_EXACT = 2.0**53  # up to which Python's floats, the ends of intervals, hold every integer


def sum_error(num_terms: float, magnitude: float, dtype: str) -> float:
    """Return a bound on the error of summing so many terms in any order, whose magnitudes sum up to `magnitude`.

    Infinite where nothing is known of the dtype, or the sum is too long for the bound.
    Source: Higham 2002, eq. (4.4), with twice the unit roundoff: products are rounded too.
    """
    if magnitude == 0:
        return 0.0
    fmt = _STORAGE.get(dtype)
    relative = num_terms * fmt.eps if fmt is not None else INF
    return magnitude * relative / (1 - relative) if relative < 1 else INF


def largest(dtype: str) -> float | None:
    """Return the largest finite number of a floating dtype; None for other dtypes."""
    fmt = _STORAGE.get(dtype)
    return None if fmt is None else fmt.max


def everything(dtype: str) -> Interval:
    """Return the interval of all numbers of a dtype."""
    return _INTEGERS.get(dtype, TOP)


def fit(a: Interval, dtype: str, *, num_roundings: float = 1) -> Interval:
    """Return the interval of numbers in `a` once they are stored as `dtype`, after `num_roundings` in their making.

    With one rounding, an end that is a number of the dtype stays, since rounding never changes the order of numbers.
    Integers wrap around where they overflow; what may be NaN or infinite becomes any integer.
    """
    fmt = _STORAGE.get(dtype)
    if fmt is not None:
        return _rounded(a, fmt, num_roundings)
    every = _INTEGERS.get(dtype)
    if every is None:
        return TOP
    if dtype == "bool" or not a.is_number or not a.is_finite:
        return every
    lo, hi = float(math.trunc(a.lo)), float(math.trunc(a.hi))
    if max(-lo, hi) >= _LARGEST_EXACT:
        lo, hi = math.nextafter(lo, -INF), math.nextafter(hi, INF)
    if lo < every.lo or hi > every.hi:
        return every
    return Interval(lo, hi, is_integer=True, is_number=True, is_tight=a.is_tight)


def _rounded(a: Interval, fmt: _Storage, num_roundings: float) -> Interval:
    if a.lo == -INF and a.hi == INF:
        return a
    lo, hi = -_outward(-a.lo, fmt, num_roundings), _outward(a.hi, fmt, num_roundings)
    return Interval(lo, hi, a.is_integer, a.is_number, a.is_tight)


def _is_number_of(x: float, fmt: _Storage) -> bool:
    """Return whether the finite `x` is a normal number of `fmt`."""
    significand, _ = math.frexp(x)
    return math.ldexp(significand, fmt.precision).is_integer() and fmt.min_normal <= abs(x) <= fmt.max


def _outward(x: float, fmt: _Storage, num_roundings: float) -> float:
    """Return an upper bound on what an exact result of at most `x` becomes."""
    if x == 0 or math.isinf(x):
        return x
    if num_roundings == 0 or (num_roundings == 1 and _is_number_of(x, fmt)):
        return x
    moved = x + abs(x) * fmt.eps * num_roundings
    if moved > fmt.max:
        return INF
    if moved < -fmt.max:
        return -fmt.max
    if -fmt.min_normal < moved < 0:  # may be flushed
        return 0.0
    return moved if abs(moved) >= fmt.min_normal else fmt.min_normal
