import math

import pytest

from autoprec.analysis.ranges import TOP, Interval
from autoprec.analysis.ranges.interval import (
    add,
    clip,
    divide,
    fit,
    hull,
    multiply,
    negate,
    point,
    signed_like,
    sum_error,
)

INF = math.inf


def ends(interval: Interval) -> tuple[float, float]:
    return interval.lo, interval.hi


def test_arithmetic_keeps_the_ends() -> None:
    a, b = Interval(-1, 2), Interval(3, 5)
    assert ends(add(a, b)) == (2, 7)
    assert ends(negate(a)) == (-2, 1)
    assert ends(multiply(a, b)) == (-5, 10)
    assert ends(divide(b, Interval(2, 4))) == (0.75, 2.5)
    assert ends(hull((a, b))) == (-1, 5)
    assert ends(clip(a, 0, 1)) == (0, 1)
    assert ends(signed_like(Interval(-1, 9), Interval(0, 3))) == (0, 9)


def test_infinite_ends_stand_for_numbers_without_bound() -> None:
    assert ends(multiply(point(0), TOP)) == (0, 0)
    assert ends(add(Interval(-INF, 0), Interval(0, INF))) == (-INF, INF)
    assert ends(multiply(Interval(0, INF), Interval(-1, 2))) == (-INF, INF)


@pytest.mark.parametrize("divisor", [Interval(-1, 1), Interval(0, 1), Interval(-1, 0), point(0), TOP])
def test_a_divisor_that_may_be_zero_gives_anything(divisor: Interval) -> None:
    assert divide(point(1), divisor) == TOP


def test_what_is_not_known_of_one_is_not_known_of_both() -> None:
    integers, numbers = Interval(0, 3, is_integer=True, is_number=True), Interval(0, 3, is_number=True)
    assert hull((integers, numbers)) == numbers
    assert add(integers, integers).is_integer
    assert not multiply(integers, numbers).is_integer
    assert hull(()) == TOP
    assert point(math.nan) == TOP


def test_ends_are_reached_only_where_one_operand_is_a_number_or_all_meet_all() -> None:
    positions = Interval(0, 99, is_tight=True)
    assert multiply(positions, point(2)).is_tight
    assert add(positions, point(2)).is_tight
    assert not multiply(positions, positions).is_tight
    assert multiply(positions, positions, is_outer=True).is_tight
    assert not positions.loose().is_tight


def test_zero_and_the_smallest_magnitude() -> None:
    assert Interval(-1, 1).contains_zero
    assert Interval(-1, 1).smallest_nonzero == 0
    assert Interval(-1, 1, is_integer=True).smallest_nonzero == 1
    assert Interval(-7, -0.5).smallest_nonzero == 0.5
    assert Interval(-7, -0.5).magnitude == 7
    assert Interval(-1, 1).contains(1)
    assert not Interval(-1, 1).contains(1.5)


def test_rounding_moves_ends_out_unless_they_are_numbers_of_the_dtype() -> None:
    assert ends(fit(Interval(0.5, 3), "float16")) == (0.5, 3)
    low, high = ends(fit(Interval(0.1, 2049.0), "float16"))
    assert low < 0.1 - 0.1 * 2**-11
    assert high >= 2050
    assert ends(fit(Interval(1, 1e6), "float16")) == (1, INF)
    assert ends(fit(Interval(1e6, 1e6), "float16")) == (65504, INF)
    assert ends(fit(Interval(1e-9, 1), "float16")) == (0, 1)
    assert ends(fit(Interval(-1, -1e-9), "float16")) == (-1, 0)
    assert ends(fit(Interval(0, 1), "float32", num_roundings=8)) == (0, 1 + 8 * 2**-23)
    assert fit(Interval(0, 1), "complex64") == TOP


def test_what_becomes_an_integer_is_cut_or_may_be_any() -> None:
    known = Interval(-1.5, 2.7, is_number=True)
    assert ends(fit(known, "int64")) == (-1, 2)
    assert ends(fit(Interval(-1.5, 2.7), "int8")) == (-128, 128)  # of a NaN
    assert ends(fit(Interval(0, 300, is_number=True), "int8")) == (-128, 128)
    assert ends(fit(Interval(0, INF, is_number=True), "int32")) == (-(2.0**31), 2.0**31)
    assert ends(fit(known, "bool")) == (0, 1)


def test_the_error_of_a_sum_grows_with_its_length_until_nothing_is_known() -> None:
    assert sum_error(0, 0.0, "float32") == 0
    assert sum_error(100, 1.0, "float32") == pytest.approx(100 * 2**-23, rel=1e-4)
    assert sum_error(1000, 1.0, "bfloat16") == INF
    assert sum_error(10, 1.0, "complex64") == INF
