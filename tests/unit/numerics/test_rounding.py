import math
from fractions import Fraction

import pytest

from autoprec.errors import FormatError
from autoprec.numerics import FORMATS, RoundingMode, round_scalar

FP16 = FORMATS["fp16"]
BF16 = FORMATS["bf16"]
E4M3 = FORMATS["fp8_e4m3"]
E5M2 = FORMATS["fp8_e5m2"]


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (257.0, 256.0),  # tie, even below
        (259.0, 260.0),  # tie, even above
        (257.0000001, 258.0),
        (0.99, 0.98828125),  # the Python scalar of design.md
        (-257.0, -256.0),
        (1 - 1e-6, 1.0),
    ],
)
def test_nearest_in_bf16(x: float, rounded: float) -> None:
    assert round_scalar(x, BF16) == rounded


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (1e-8, 0.0),
        (2.0**-25, 0.0),
        (2.0**-25 * 1.0000001, 2.0**-24),
        (3 * 2.0**-25, 2 * 2.0**-24),
        (6e-5, 6.0021877e-5),
    ],
)
def test_subnormals_of_fp16(x: float, rounded: float) -> None:
    assert round_scalar(x, FP16) == pytest.approx(rounded, rel=1e-7, abs=0)


def test_overflow_starts_half_an_ulp_beyond_max() -> None:
    assert round_scalar(math.nextafter(65520.0, 0), FP16) == 65504.0
    assert round_scalar(65520.0, FP16) == math.inf
    assert round_scalar(-65520.0, FP16) == -math.inf


def test_the_tie_beyond_max_of_e4m3_goes_to_max_because_that_is_even() -> None:
    assert round_scalar(464.0, E4M3) == 448.0
    assert math.isnan(round_scalar(464.0001, E4M3))
    assert round_scalar(464.0001, E4M3, saturate=True) == 448.0


def test_infinity_overflows() -> None:
    assert round_scalar(math.inf, FP16) == math.inf
    assert math.isnan(round_scalar(math.inf, E4M3))
    assert round_scalar(-math.inf, E4M3, saturate=True) == -448.0
    assert round_scalar(math.inf, E5M2, saturate=True) == 57344.0


def test_toward_zero() -> None:
    assert round_scalar(1.999, E5M2, mode="toward_zero") == 1.75
    assert round_scalar(-1.999, E5M2, mode="toward_zero") == -1.75
    assert round_scalar(1e9, FP16, mode="toward_zero") == 65504.0
    assert round_scalar(math.inf, FP16, mode="toward_zero") == math.inf


@pytest.mark.parametrize(("uniform", "rounded"), [(0.0, 258.0), (0.4999, 258.0), (0.5, 256.0), (0.9999, 256.0)])
def test_stochastic_rounds_away_below_the_fraction(uniform: float, rounded: float) -> None:
    assert round_scalar(257.0, BF16, mode="stochastic", uniform=uniform) == rounded
    assert round_scalar(-257.0, BF16, mode="stochastic", uniform=uniform) == -rounded


def test_stochastic_keeps_what_the_format_holds() -> None:
    assert round_scalar(256.0, BF16, mode="stochastic", uniform=0.0) == 256.0


@pytest.mark.parametrize("mode", ["nearest", "toward_zero"])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_signed_zeros(name: str, mode: RoundingMode) -> None:
    fmt = FORMATS[name]
    assert math.isnan(round_scalar(math.nan, fmt, mode=mode))
    assert math.copysign(1.0, round_scalar(0.0, fmt, mode=mode)) == 1.0
    assert math.copysign(1.0, round_scalar(-0.0, fmt, mode=mode)) == -1.0
    assert math.copysign(1.0, round_scalar(-fmt.min_subnormal / 4, fmt, mode=mode)) == -1.0


def test_a_fraction_is_rounded_once() -> None:
    # 1 + 2^-8 + 2^-60 is just above a tie of bf16; as a double it would be the tie, which goes down to 1.
    x = 1 + Fraction(1, 2**8) + Fraction(1, 2**60)
    assert float(x) == 1 + 2.0**-8
    assert round_scalar(x, BF16) == 1 + 2.0**-7


def test_a_fraction_need_not_be_a_float() -> None:
    # 1/3 = 1.0101...b * 2^-2; the 11th bit of the significand is 1 and what follows is below a half
    assert round_scalar(Fraction(1, 3), FP16) == 0b10101010101 * 2.0**-12


@pytest.mark.parametrize(("mode", "uniform"), [("stochastic", None), ("nearest", 0.5), ("toward_zero", 0.5)])
def test_uniform_belongs_to_stochastic(mode: RoundingMode, uniform: float | None) -> None:
    with pytest.raises(FormatError, match="with mode 'stochastic' only"):
        round_scalar(1.0, BF16, mode=mode, uniform=uniform)
