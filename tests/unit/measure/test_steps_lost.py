from dataclasses import replace

import pytest

from autoprec.measure.fidelity import _verdict
from autoprec.measure.series import Line
from autoprec.measure.steps_lost import Pair, bounds, loses_less_than, loses_more_than, power, trend

T_10 = 1.8125  # Student's t: 95 % quantile at 10 degrees of freedom, from a table
PAIR = Pair(
    difference=Line(center=150.5, level=0.004, slope=0.0, level_se=0.001, slope_se=1e-6, dof=10),
    slope=0.002,
    slope_se=0.0004,
    visible=0.0004,
    falls=True,
    log_step=140.0,
    horizon=200,
    rounding=1e-9,
)


def test_fiellers_bounds_are_the_steps_that_the_test_just_rejects():
    lower, upper = bounds(PAIR)
    for steps in (lower, upper):
        error = (PAIR.difference.level_se**2 + (steps * PAIR.slope_se) ** 2) ** 0.5
        assert abs(PAIR.difference.level - steps * PAIR.slope) / error == pytest.approx(T_10, rel=1e-4)
    assert PAIR.steps == pytest.approx(2)
    assert upper - 2 > 2 - lower  # a slope that may be small makes the upper bound the far one


def test_tests_and_bounds_agree():
    lower, upper = bounds(PAIR)
    assert loses_more_than(0.999 * lower, PAIR)
    assert not loses_more_than(1.001 * lower, PAIR)
    assert loses_less_than(1.001 * upper, replace(PAIR, visible=0.0))
    assert not loses_less_than(0.999 * upper, replace(PAIR, visible=0.0))


def test_bounds_on_a_curve_that_does_not_visibly_fall():
    flat = replace(PAIR, slope=0.0001, falls=False)
    lower, upper = bounds(flat)
    # At least: the sure part of the difference over the steepest possible slope. At most: over the smallest visible.
    assert lower == pytest.approx((0.004 - T_10 * 0.001) / (0.0001 + T_10 * 0.0004), rel=1e-4)
    assert upper == pytest.approx((0.004 + T_10 * 0.001) / 0.0004, rel=1e-4)
    assert flat.steps == pytest.approx(0.004 / 0.0004)


def test_power_counts_the_least_slope_that_is_likely():
    t_80 = 0.8791  # 80 % quantile, from a table
    assert power(PAIR) == pytest.approx((T_10 + t_80) * 0.001 / (0.002 - T_10 * 0.0004), rel=1e-3)


def test_growth_is_prolonged_to_two_horizons():
    growing = replace(PAIR, difference=replace(PAIR.difference, slope=1e-5))
    found = trend(growing)
    assert found.grows
    assert found.projected_frac == pytest.approx((0.004 + 1e-5 * (400 - 150.5)) / (0.002 * 140))
    assert found.growth_frac == pytest.approx(1e-5 * 200 / (0.002 * 140))


def test_growth_whose_end_is_uncertain_is_inconclusive():
    # Surely growing (t = 3.3, p = 0.4 %), projected to 2.4 % of the margin's 2 %, but not surely above it.
    line = replace(PAIR.difference, level=0.0, level_se=1e-4, slope=2.7e-5, slope_se=8e-6)
    growing = replace(PAIR, difference=line)
    assert trend(growing).projected_frac == pytest.approx(0.024, rel=0.02)
    assert _verdict(growing, trend(growing), 0.02) == "inconclusive"
    steady = replace(growing, difference=replace(line, slope=0.0))
    assert _verdict(steady, trend(steady), 0.02) == "faithful"
