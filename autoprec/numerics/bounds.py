"""How wrong a sum can get: worst-case and probable error bounds, and where a sum stops growing."""

import math

from autoprec.errors import FormatError
from autoprec.numerics.formats import Format


def gamma(n: int, fmt: Format) -> float:
    """Return gamma_n = n u / (1 - n u), the worst relative error of a product of n factors (1 + delta), |delta| <= u.

    An inner product of length n computed in `fmt`, in any order, has an error of at most gamma_n |x|.|y|.
    Infinite if n u >= 1: the bound then says nothing.
    Source: Higham 2002, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and eq. (3.5).
    """
    nu = _checked(n) * fmt.unit_roundoff
    return nu / (1 - nu) if nu < 1 else math.inf


def gamma_probable(n: int, fmt: Format, *, confidence_factor: float = 3.0) -> float:
    """Return the probabilistic gamma_n, which grows with sqrt(n) if rounding errors are independent with mean zero.

    It is exp(lambda sqrt(n) u + n u^2 / (1 - u)) - 1 with lambda = `confidence_factor`; `gamma_confidence` gives the
    probability that it holds. Swamped sums break the assumption: all their errors have the same sign.
    Source: Higham & Mary 2019, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5),
    theorem 2.4.
    """
    u = fmt.unit_roundoff
    exponent = confidence_factor * math.sqrt(_checked(n)) * u + n * u * u / (1 - u)
    try:
        return math.expm1(exponent)
    except OverflowError:
        return math.inf


def gamma_confidence(confidence_factor: float, fmt: Format) -> float:
    """Return the lower bound 1 - 2 exp(-lambda^2 (1 - u)^2 / 2) on the probability that `gamma_probable` holds.

    Zero where the bound is negative and says nothing.
    Source: Higham & Mary 2019, theorem 2.4.
    """
    return max(0.0, 1 - 2 * math.exp(-(confidence_factor**2) * (1 - fmt.unit_roundoff) ** 2 / 2))


def sum_bound(n: int, fmt: Format, *, pairwise: bool = False) -> float:
    """Return c such that summing n numbers of `fmt` in `fmt` has an error of at most c sum |x_i|.

    In any order c is gamma_(n-1); pairwise it is gamma_ceil(log2 n), what blocked and tree reductions come near.
    Source: Higham 2002, eq. (4.4), with gamma_(n-1) for (n - 1) u + O(u^2), and eq. (4.6).
    """
    _checked(n)
    if n <= 1:
        return 0.0
    return gamma((n - 1).bit_length() if pairwise else n - 1, fmt)


def stall_sum(term: float, fmt: Format) -> float:
    """Return the sum at which adding `term` again and again, one by one in `fmt`, stops changing it.

    It is the first power of two with |term| <= half an ulp, where a tie goes to the even significand: for terms of 1
    that is `fmt.max_exact_integer`, reached after as many terms. Infinite if the sum overflows before it stalls.
    `term` is taken to be a number of `fmt`; the sign of the result is that of `term`.
    Raises: `FormatError` if `term` is zero, infinite or NaN.
    """
    if term == 0 or not math.isfinite(term):
        raise FormatError(f"no sum of terms {term} stalls; give a finite term other than zero")
    significand, exponent = math.frexp(abs(term))
    ceil_log2 = exponent - 1 if significand == 0.5 else exponent
    stall_exponent = ceil_log2 + fmt.precision
    magnitude = math.ldexp(1.0, stall_exponent) if stall_exponent <= fmt.max_exponent else math.inf
    return math.copysign(magnitude, term)


def _checked(n: int) -> int:
    if n < 0:
        raise FormatError(f"a sum of {n} terms; the length must be 0 or more")
    return n
