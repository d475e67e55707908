import math

import pytest
import torch

from autoprec.analysis import pieces
from autoprec.analysis.histogram import ExponentHistogram, exponent_histogram
from autoprec.numerics import FORMATS


def test_elements_fall_between_powers_of_two_and_the_lower_one_belongs() -> None:
    found = exponent_histogram(torch.tensor([1.0, 1.5, -1.999, 2.0, 0.5, -0.25, 0.0, -0.0]))
    assert found == ExponentHistogram(counts=((-2, 1), (-1, 1), (0, 3), (1, 1)), num_zero=2, max_abs=2.0)


def test_infinities_and_nans_are_counted_apart() -> None:
    found = exponent_histogram(torch.tensor([math.inf, -math.inf, math.nan, 4.0]))
    assert found == ExponentHistogram(counts=((2, 1),), num_nonfinite=3, max_abs=4.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_every_dtype_has_its_smallest_and_largest_number_in_a_bin(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    found = exponent_histogram(torch.tensor([smallest, info.max], dtype=torch.float64).to(dtype))
    assert found.counts == ((round(math.log2(smallest)), 1), (math.frexp(info.max)[1] - 1, 1))
    assert found.max_abs == info.max


def test_shapes_strides_and_layouts_do_not_matter() -> None:
    x = torch.arange(1.0, 13).reshape(3, 4)
    assert exponent_histogram(x.t()[::1]) == exponent_histogram(x.flatten())
    assert exponent_histogram(torch.tensor(3.0)) == ExponentHistogram(counts=((1, 1),), max_abs=3.0)
    assert exponent_histogram(torch.empty(0, 3)) == ExponentHistogram()
    sparse = torch.sparse_coo_tensor([[0, 1, 1]], [1.0, 2.0, 2.0], (4,), check_invariants=True)
    assert exponent_histogram(sparse) == ExponentHistogram(counts=((0, 1), (2, 1)), max_abs=4.0)


def test_reading_in_pieces_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = exponent_histogram(x)
    monkeypatch.setattr(pieces, "_CPU_PIECE", 7)
    assert exponent_histogram(x) == whole


def test_a_sum_of_histograms_is_that_of_both_tensors() -> None:
    a, b = torch.tensor([1.0, 0.0, math.inf]), torch.tensor([1.0, 8.0])
    assert exponent_histogram(a) + exponent_histogram(b) == exponent_histogram(torch.cat([a, b]))


def test_fractions_below_a_power_of_two() -> None:
    found = exponent_histogram(torch.tensor([0.25, 0.5, 0.75, 4.0, 0.0]))
    assert [found.frac_below(k) for k in (-2, -1, 0, 3)] == [0, 0.25, 0.75, 1]
    # By the lower ends of the bins: 1/4, 1/2, 1/2, 4.
    assert found.norm_frac_below(0) == pytest.approx(math.sqrt((1 / 16 + 2 / 4) / (1 / 16 + 2 / 4 + 16)))
    assert found.norm_frac_below(3) == 1


def test_the_norm_is_right_where_its_square_is_not_a_float() -> None:
    """2**-1000 squared is 0 and 2**1000 squared is inf; half of the squared norm is below."""
    for exponent in (-1000, 1000):
        found = ExponentHistogram(counts=((exponent, 4), (exponent + 1, 1)))
        assert found.norm_frac_below(exponent + 1) == pytest.approx(math.sqrt(1 / 2))


def test_nothing_has_no_fraction_below_anything() -> None:
    assert ExponentHistogram(num_zero=3).frac_below(0) == 0
    assert ExponentHistogram(num_zero=3).norm_frac_below(0) == 0


FP16, E4M3, E5M2 = FORMATS["fp16"], FORMATS["fp8_e4m3"], FORMATS["fp8_e5m2"]


def test_fractions_of_a_format_under_a_loss_scale() -> None:
    """fp16: below 2**-25 is zero, below 2**-14 subnormal, from 65520 on infinite."""
    found = exponent_histogram(torch.tensor([2.0**-30, 2.0**-20, 1.0, 2.0**17, 0.0, math.inf]))
    assert (found.flush_frac(FP16), found.subnormal_frac(FP16), found.overflow_frac(FP16)) == (1 / 4, 2 / 4, 1 / 4)
    assert (found.flush_frac(FP16, 2.0**5), found.subnormal_frac(FP16, 2.0**6)) == (0, 1 / 4)
    assert (found.overflow_frac(FP16, 0.25), found.overflow_frac(FP16, 2.0**16)) == (0, 2 / 4)


@pytest.mark.parametrize("low", [FP16, FORMATS["bf16"], E4M3, E5M2])
def test_overflow_is_zero_exactly_where_the_largest_still_rounds_into_range(low) -> None:
    tie = low.max + math.ldexp(1.0, low.max_exponent - low.mantissa_bits - 1)
    beyond = exponent_histogram(torch.tensor([1.0, 1.001 * tie], dtype=torch.float64))
    within = exponent_histogram(torch.tensor([1.0, 0.999 * tie], dtype=torch.float64))
    assert (beyond.overflow_frac(low), within.overflow_frac(low)) == (1 / 2, 0)
    at_tie = exponent_histogram(torch.tensor([1.0, tie], dtype=torch.float64))
    assert at_tie.overflow_frac(low) == (0 if low is E4M3 else 1 / 2)  # the significand of 448 is even, the others odd


def test_a_bound_inside_a_bin_takes_a_part_of_it() -> None:
    """240 of e4m3's largest 448: the bound of 464 is 13/16 into [256, 512)."""
    even = exponent_histogram(torch.arange(256.0, 512.0))
    assert even.overflow_frac(E4M3) == pytest.approx(3 / 16)
    assert even.overflow_frac(E4M3) * 256 == (torch.arange(256.0, 512.0) >= 464).sum()
    assert exponent_histogram(torch.arange(64.0, 128.0)).flush_frac(FP16, 2.0**-31 / 1.5) == pytest.approx(1 / 2)


def test_headroom_is_in_powers_of_two() -> None:
    assert exponent_histogram(torch.tensor([0.5, -1.0])).headroom(E5M2) == math.log2(57344)
    assert exponent_histogram(torch.tensor([2.0**20])).headroom(FP16) == math.log2(65504) - 20
    assert ExponentHistogram(num_zero=2).headroom(FP16) is None


def test_nothing_has_no_fraction_of_a_format() -> None:
    nothing = ExponentHistogram(num_zero=3)
    assert (nothing.flush_frac(FP16), nothing.subnormal_frac(FP16), nothing.overflow_frac(FP16)) == (0, 0, 0)


def test_a_negative_nan_is_counted_as_one() -> None:
    negative = torch.tensor([-1, -(2**22)], dtype=torch.int32).view(torch.float32)
    assert negative.isnan().all()
    assert exponent_histogram(negative) == ExponentHistogram(num_nonfinite=2)
