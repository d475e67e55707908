import math
import struct
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.numerics import FORMATS, Format, RoundingMode, is_swamped, next_down, next_up, round_scalar, ulp
from autoprec.runtime.rounding import round_to

formats = st.sampled_from(list(FORMATS.values()))
deterministic = st.sampled_from(["nearest", "toward_zero"])
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def in_range(draw: st.DrawFn) -> tuple[Format, float]:
    """Draw a format and a finite number of a magnitude that matters to it."""
    fmt = draw(formats)
    exponent = draw(st.integers(fmt.min_exponent - fmt.mantissa_bits - 2, fmt.max_exponent))
    significand = draw(st.integers(2**52, 2**53 - 1)) * draw(st.sampled_from((-1, 1)))
    return fmt, max(-fmt.max, min(fmt.max, math.ldexp(significand, exponent - 52)))


def bits(x: float) -> bytes:
    return b"nan" if math.isnan(x) else struct.pack("<d", x)


@given(formats, st.integers(0, 2**64 - 1), deterministic, st.booleans())
def test_tensor_equals_oracle_on_any_bits(fmt: Format, code: int, mode: RoundingMode, saturate: bool) -> None:
    x = struct.unpack("<d", struct.pack("<Q", code))[0]
    seen = round_to(torch.tensor(x, dtype=torch.float64), fmt.name, mode=mode, saturate=saturate).item()
    assert bits(seen) == bits(round_scalar(x, fmt, mode=mode, saturate=saturate))


@given(in_range(), deterministic)
def test_tensor_equals_oracle_in_the_range_of_the_format(case: tuple[Format, float], mode: RoundingMode) -> None:
    fmt, x = case
    double = torch.tensor(x, dtype=torch.float64)
    assert bits(round_to(double, fmt.name, mode=mode).item()) == bits(round_scalar(x, fmt, mode=mode))
    single = double.float()
    expected = round_scalar(single.item(), fmt, mode=mode)
    assert bits(round_to(single, fmt.name, mode=mode).item()) == bits(expected)


@given(in_range())
def test_nearest_is_nearest(case: tuple[Format, float]) -> None:
    fmt, x = case
    rounded = round_scalar(x, fmt)
    error = abs(Fraction(rounded) - Fraction(x))
    assert error <= Fraction(ulp(x, fmt)) / 2
    for neighbor in (next_down(rounded, fmt), next_up(rounded, fmt)):
        if math.isfinite(neighbor):
            assert error <= abs(Fraction(neighbor) - Fraction(x))


@given(in_range())
def test_relative_error_is_at_most_the_unit_roundoff(case: tuple[Format, float]) -> None:
    fmt, x = case
    if abs(x) >= fmt.min_normal:
        assert abs(Fraction(round_scalar(x, fmt)) - Fraction(x)) <= Fraction(fmt.unit_roundoff) * abs(Fraction(x))


@given(formats, finite, deterministic)
def test_rounding_twice_changes_nothing(fmt: Format, x: float, mode: RoundingMode) -> None:
    once = round_scalar(x, fmt, mode=mode)
    assert bits(round_scalar(once, fmt, mode=mode)) == bits(once)


@given(formats, finite, finite, deterministic)
def test_rounding_keeps_the_order(fmt: Format, x: float, y: float, mode: RoundingMode) -> None:
    low, high = sorted((x, y))
    assert round_scalar(low, fmt, mode=mode, saturate=True) <= round_scalar(high, fmt, mode=mode, saturate=True)


@given(formats, finite)
def test_rounding_is_odd(fmt: Format, x: float) -> None:
    assert bits(round_scalar(-x, fmt)) == bits(-round_scalar(x, fmt))


@given(in_range(), st.floats(0, 1, exclude_max=True))
def test_stochastic_takes_one_of_the_two_neighbors(case: tuple[Format, float], uniform: float) -> None:
    fmt, x = case
    rounded = round_scalar(x, fmt, mode="stochastic", uniform=uniform)
    nearer = round_scalar(x, fmt, mode="toward_zero")
    farther = math.copysign(next_up(abs(nearer), fmt), x)
    assert rounded == nearer or bits(rounded) == bits(farther)
    if nearer == x:
        assert rounded == x


@given(in_range(), st.floats(0.0625, 4))
def test_swamping_is_an_addend_of_at_most_half_an_ulp(case: tuple[Format, float], ulps: float) -> None:
    fmt, x = case
    total = round_scalar(x, fmt)
    if not fmt.min_normal <= abs(total) < fmt.max / 2:
        return
    addend = math.copysign(ulps * ulp(total, fmt), total)  # away from zero, where the gap does not halve
    if ulps != 0.5:
        assert is_swamped(addend, total, fmt) == (ulps < 0.5)
