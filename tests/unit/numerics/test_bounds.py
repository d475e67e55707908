import itertools
import math
import random
from fractions import Fraction

import pytest

from autoprec.errors import FormatError
from autoprec.numerics import (
    FORMATS,
    Format,
    gamma,
    gamma_confidence,
    gamma_probable,
    round_scalar,
    stall_sum,
    sum_bound,
)

BF16 = FORMATS["bf16"]
FP32 = FORMATS["fp32"]


def summed(terms: list[float], fmt: Format) -> float:
    """Return the terms added one by one in `fmt`."""
    total = 0.0
    for term in terms:
        total = round_scalar(Fraction(total) + Fraction(term), fmt)
    return total


def summed_pairwise(terms: list[float], fmt: Format) -> float:
    """Return the terms added in a balanced tree in `fmt`."""
    while len(terms) > 1:
        pairs = itertools.zip_longest(terms[::2], terms[1::2], fillvalue=0.0)
        terms = [round_scalar(Fraction(a) + Fraction(b), fmt) for a, b in pairs]
    return terms[0]


def test_gamma_by_hand() -> None:
    # u = 2^-8, n = 64: 1/4 / (1 - 1/4)
    assert gamma(64, BF16) == pytest.approx(1 / 3, rel=1e-15)
    assert gamma(0, BF16) == 0.0
    assert gamma(256, BF16) == math.inf
    assert gamma(1000, BF16) == math.inf


def test_gamma_probable_grows_with_the_square_root() -> None:
    # for small u it is lambda sqrt(n) u to first order; the second-order terms are below 1e-4 of it here
    assert gamma_probable(10_000, FP32, confidence_factor=2.0) == pytest.approx(2 * 100 * 2.0**-24, rel=1e-4)
    assert gamma_probable(10_000, FP32) < gamma(10_000, FP32)
    assert gamma_probable(0, BF16) == 0.0
    assert gamma_probable(10**12, BF16) == math.inf


def test_gamma_confidence() -> None:
    assert gamma_confidence(3.0, FP32) == pytest.approx(1 - 2 * math.exp(-4.5), abs=1e-6)
    assert gamma_confidence(0.5, FP32) == 0.0


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3"])
def test_sums_stay_within_their_bounds(name: str) -> None:
    fmt = FORMATS[name]
    rng = random.Random(0)
    n = int(0.9 / fmt.unit_roundoff) if fmt.storage_bits == 8 else 60
    for _ in range(20):
        terms = [round_scalar(rng.uniform(-1, 1), fmt) for _ in range(n)]
        exact, size = sum(map(Fraction, terms)), sum(abs(Fraction(term)) for term in terms)
        assert abs(Fraction(summed(terms, fmt)) - exact) <= Fraction(sum_bound(n, fmt)) * size
        assert abs(Fraction(summed_pairwise(terms, fmt)) - exact) <= Fraction(sum_bound(n, fmt, pairwise=True)) * size


def test_sum_bound_counts_additions() -> None:
    assert sum_bound(0, BF16) == sum_bound(1, BF16) == 0.0
    assert sum_bound(2, BF16) == gamma(1, BF16)
    assert sum_bound(65, BF16) == gamma(64, BF16)
    assert sum_bound(64, BF16, pairwise=True) == gamma(6, BF16)
    assert sum_bound(65, BF16, pairwise=True) == gamma(7, BF16)


@pytest.mark.parametrize("function", [gamma, gamma_probable, sum_bound])
def test_a_negative_length_is_an_error(function: object) -> None:
    assert callable(function)
    with pytest.raises(FormatError, match="a sum of -1 terms"):
        function(-1, BF16)


@pytest.mark.parametrize(
    ("name", "term"),
    [("bf16", 1.0), ("bf16", -1.0), ("bf16", 1.5), ("bf16", 1.0078125), ("fp16", 3.0), ("fp16", 2.0**-24)]
    + [(name, term) for name in ("fp8_e4m3", "fp8_e5m2") for term in (1.0, 1.25, 1.75, 2.0**-9, -0.75)],
)
def test_stall_sum_is_where_a_simulated_sum_stops(name: str, term: float) -> None:
    fmt = FORMATS[name]
    total, before = round_scalar(term, fmt), 0.0
    while total != before:
        total, before = round_scalar(Fraction(total) + Fraction(term), fmt), total
    assert stall_sum(term, fmt) == total


@pytest.mark.parametrize("name", FORMATS)
def test_counting_stalls_at_the_largest_exact_integer(name: str) -> None:
    assert stall_sum(1.0, FORMATS[name]) == FORMATS[name].max_exact_integer


def test_a_sum_may_overflow_before_it_stalls() -> None:
    assert stall_sum(64.0, FORMATS["fp16"]) == math.inf
    assert stall_sum(-64.0, FORMATS["fp16"]) == -math.inf
    assert stall_sum(16.0, FORMATS["fp16"]) == 32768.0


@pytest.mark.parametrize("term", [0.0, math.inf, math.nan])
def test_stall_sum_needs_a_finite_term(term: float) -> None:
    with pytest.raises(FormatError, match="give a finite term other than zero"):
        stall_sum(term, BF16)
