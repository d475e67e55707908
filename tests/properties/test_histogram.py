"""Exponent histograms and what they say of formats, against one number at a time."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.analysis.histogram import exponent_histogram
from autoprec.analysis.tensor_numerics import tensor_numerics
from autoprec.numerics import FORMATS, round_scalar

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)
LOW = tuple(row for row in FORMATS.values() if row.name != "fp32")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def numbers(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of random codes of `dtype`: NaN, infinities, zeros and subnormals of both signs among them."""
    width = dtype.itemsize
    edges = [0, 1, -1, -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1]
    codes = st.one_of(st.integers(-(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1), st.sampled_from(edges))
    return torch.tensor(draw(st.lists(codes, max_size=40)), dtype=BITS[width]).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_every_element_is_in_the_bin_of_its_exponent(dtype, data):
    x = data.draw(numbers(dtype))
    values = x.double().tolist()
    finite = [value for value in values if math.isfinite(value)]
    found = exponent_histogram(x)
    assert dict(found.counts) == Counter(math.frexp(value)[1] - 1 for value in finite if value)
    assert list(found.counts) == sorted(found.counts)
    assert (found.num_zero, found.num_nonfinite) == (finite.count(0), len(values) - len(finite))
    assert found.max_abs == max(map(abs, finite), default=0)
    assert found.num_nonzero + found.num_zero + found.num_nonfinite == x.numel()
    assert tensor_numerics(x, ["bf16"]).histogram == found


@pytest.mark.parametrize("low", LOW, ids=lambda low: low.name)
@given(data=st.data(), scale_exponent=st.integers(-20, 24))
def test_fractions_are_those_of_rounding_each_element(low, data, scale_exponent):
    """Elements at half the smallest number, a tie, count as kept; those in the bin of the largest one are estimated."""
    exponents = st.integers(low.min_exponent - low.mantissa_bits - 4, low.max_exponent + 3)
    pairs = data.draw(st.lists(st.tuples(exponents, st.integers(2**23, 2**24 - 1)), min_size=1, max_size=30))
    x = torch.tensor([math.ldexp(m, e - 23 - scale_exponent) for e, m in pairs], dtype=torch.float64)
    scaled = [Fraction(value) * Fraction(2) ** scale_exponent for value in x.tolist()]
    rounded = [round_scalar(value, low) for value in scaled]
    num_ties = scaled.count(Fraction(low.min_subnormal) / 2)
    found, scale = exponent_histogram(x), 2.0**scale_exponent
    assert round(found.flush_frac(low, scale) * len(scaled)) == rounded.count(0) - num_ties
    assert round(found.subnormal_frac(low, scale) * len(scaled)) == sum(v < Fraction(low.min_normal) for v in scaled)
    num_overflow = sum(not math.isfinite(value) for value in rounded)
    num_estimated = sum(2**low.max_exponent <= value < 2 ** (low.max_exponent + 1) for value in scaled)
    estimate = found.overflow_frac(low, scale) * len(scaled)
    assert (estimate == 0) == (num_overflow == 0)
    assert abs(estimate - num_overflow) <= num_estimated
    if num_overflow and not num_estimated:
        assert estimate == pytest.approx(num_overflow)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_fractions_are_those_of_torchs_casts(name):
    """On numbers of random significands no tie occurs."""
    low, x = FORMATS[name], torch.randn(20_000) * torch.exp2(torch.randint(-40, 20, (20_000,)))
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}.get(
        name, torch.float8_e5m2
    )
    found, scale = tensor_numerics(x, [name]), 2.0**8
    cast = (x * scale).to(dtype).float()
    assert found.histogram.flush_frac(low, scale) == int((cast == 0).sum()) / x.numel()
    assert found.histogram.subnormal_frac(low, scale) == int((x.abs() * scale < low.min_normal).sum()) / x.numel()
    # beyond the largest number torch's e4m3 saturates or gives NaN, by version
    overflows = x.abs() > 464 if name == "fp8_e4m3" else ~x.to(dtype).float().isfinite()
    assert found.rounding[name].num_overflow == int(overflows.sum())
