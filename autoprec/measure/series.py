"""Level and slope of an autocorrelated series, with honest errors.

Losses of consecutive steps are not independent, so the usual standard error of a mean is too small. Here the noise at
low frequency is measured where it acts: the series is projected on orthonormal polynomials; degree 0 carries the level,
degree 1 the slope, and the next `dof` degrees nothing but noise of the same low frequency. Level and slope divided by
their standard errors then follow Student's t with `dof` degrees of freedom: exactly for white Gaussian noise,
approximately for stationary noise that is not much more persistent than the series is long.

Source: Lazarus, Lewis, Stock, Watson 2018, HAR Inference: Recommendations for Practice, JBES 36(4), 541-559 (dof =
0.4 n^(2/3) terms, t critical values); Sun 2013, Econometrics Journal 16(1), 1-26 (any orthonormal basis serves).
Polynomials instead of their cosines, because a cosine overlaps with the trend that is fitted here too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy.special
from numpy.polynomial import legendre

MIN_LENGTH = 4
_MAX_DOF = 64  # polynomials on n equidistant points stay well conditioned up to degree 2 sqrt(n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The least-squares line level + slope * (x - center) through a series, and standard errors with `dof`.

    The errors of level and slope are uncorrelated, also between two series with the same x.
    """

    center: float
    level: float
    slope: float
    level_se: float
    slope_se: float
    dof: int


def fit_line(values: Sequence[float], x: Sequence[float]) -> Line:
    """Return the line through `values` over increasing `x`; at least `MIN_LENGTH` of them."""
    y = np.asarray(values, dtype=np.float64)
    basis, center, spread = _polynomials(tuple(x))
    level = float(y.mean())
    weights = basis @ (y - level)
    noise = math.sqrt(float(np.mean(weights[2:] ** 2)))
    return Line(
        center=center,
        level=level,
        slope=float(weights[1]) / spread,
        level_se=noise / math.sqrt(len(y)),
        slope_se=noise / spread,
        dof=degrees_of_freedom(len(y)),
    )


@lru_cache(maxsize=256)  # two for each length at which a trial is looked at, of several horizons
def _polynomials(x: tuple[float, ...]) -> tuple[npt.NDArray[np.float64], float, float]:
    """Return the orthonormal polynomials on `x`, one a row, the mean of `x` and the root of its sum of squares."""
    at = np.asarray(x, dtype=np.float64)
    center = float(at.mean())
    scaled = 2 * (at - at[0]) / (at[-1] - at[0]) - 1
    basis, triangle = np.linalg.qr(legendre.legvander(scaled, degrees_of_freedom(len(at)) + 1))
    signed = (basis * np.sign(np.diag(triangle))).T
    return signed, center, math.sqrt(float(np.sum((at - center) ** 2)))


def degrees_of_freedom(length: int) -> int:
    """Return how many noise terms a series of `length` affords: 0.4 n^(2/3), at least 2."""
    return max(2, min(round(0.4 * math.pow(length, 2 / 3)), _MAX_DOF))


def t_quantile(probability: float, dof: int) -> float:
    """Return the quantile of Student's t."""
    return float(scipy.special.stdtrit(dof, probability))


def t_tail(value: float, dof: int) -> float:
    """Return the probability that Student's t exceeds `value`."""
    return float(scipy.special.stdtr(dof, -value))
