import numpy as np
import pytest

from autoprec.measure.series import degrees_of_freedom, fit_line, t_quantile, t_tail


def test_a_line_without_noise_is_found_exactly():
    x = np.arange(1, 41, dtype=float)
    line = fit_line(3 + 0.5 * (x - x.mean()), x)
    assert line.center == 20.5
    assert line.level == pytest.approx(3)
    assert line.slope == pytest.approx(0.5)
    assert line.level_se == pytest.approx(0, abs=1e-12)
    assert line.slope_se == pytest.approx(0, abs=1e-12)


def test_level_and_slope_are_those_of_least_squares_on_uneven_x():
    x = np.log(np.arange(50, 101))
    y = np.random.default_rng(0).normal(size=51)
    line = fit_line(y, x)
    slope, _ = np.polyfit(x, y, 1)
    assert line.slope == pytest.approx(slope)
    assert line.level == pytest.approx(y.mean())


@pytest.mark.parametrize(("length", "dof"), [(4, 2), (10, 2), (30, 4), (150, 11), (200, 14), (10**6, 64)])
def test_degrees_of_freedom_follow_lazarus_et_al(length, dof):
    assert degrees_of_freedom(length) == dof


def test_student_t_against_a_table():
    assert t_quantile(0.95, 2) == pytest.approx(2.920, abs=5e-4)
    assert t_tail(2.920, 2) == pytest.approx(0.05, abs=1e-5)


@pytest.mark.parametrize(("rho", "allowed"), [(0.0, 0.08), (0.7, 0.12)])
def test_the_level_of_an_autocorrelated_series_is_covered(rho, allowed):
    # 1000 one-sided 95 % bounds miss 5 % +- 0.7 % (binomial) of white noise: 8 % is four standard errors away.
    # Noise with rho = 0.7 is known to be missed a little more often; a plain standard error would miss 25 % of it.
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(1000):
        noise = rng.normal(size=200)
        for t in range(1, 200):
            noise[t] += rho * noise[t - 1]
        line = fit_line(noise[50:], np.arange(150.0))
        missed += line.level > t_quantile(0.95, line.dof) * line.level_se
    assert missed / 1000 < allowed
