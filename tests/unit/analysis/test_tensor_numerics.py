import math

import pytest
import torch

from autoprec.analysis import pieces
from autoprec.analysis.histogram import exponent_histogram
from autoprec.analysis.tensor_numerics import Rounding, TensorNumerics, tensor_numerics
from autoprec.numerics import FORMATS
from autoprec.runtime.rounding import round_to

LOW = tuple(name for name in FORMATS if name != "fp32")


def directly(x: torch.Tensor, name: str) -> Rounding:
    """Return the rounding by its definition, in float64."""
    rounded = round_to(x.float() if x.dtype not in (torch.float32, torch.float64) else x, name).double()
    kept = rounded.isfinite() & x.isfinite()
    unit = (
        max(x.double().abs()[kept].tolist(), default=1.0) or 1.0
    )  # squares of float64 numbers overflow and vanish too
    return Rounding(
        num_overflow=int((x.isfinite() & ~kept).sum()),
        error_norm=float(unit * ((rounded - x.double())[kept] / unit).norm()),
        norm=float(unit * (x.double()[kept] / unit).norm()),
    )


def wide(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of every exponent of `dtype`, subnormal ones too."""
    info = torch.finfo(dtype)
    exponents = torch.arange(math.log2(info.smallest_normal * info.eps), math.log2(info.max))
    significands = 1 + torch.rand(exponents.numel(), 20, dtype=torch.float64)
    return (significands * torch.exp2(exponents.double())[:, None]).clamp(max=info.max).to(dtype)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_rounding_is_that_of_the_definition_over_the_whole_range(dtype, name):
    for sign in (1, -1):
        x = wide(dtype).double().mul(sign).to(dtype)
        expected, found = directly(x, name), tensor_numerics(x, [name]).rounding[name]
        assert found.num_overflow == expected.num_overflow
        # 53 and 24 bits, less those that the sum of some thousand squares costs
        assert found.error_norm == pytest.approx(expected.error_norm, rel=1e-5)
        assert found.norm == pytest.approx(expected.norm, rel=1e-5)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("exponent", [-140, -120, -60, -41, -20, 0, 14, 40, 52, 90, 101, 126])
def test_rounding_in_every_binade(exponent, name):
    x = torch.ldexp(1 + torch.rand(1000, dtype=torch.float64), torch.tensor(exponent)).float()
    expected, found = directly(x, name), tensor_numerics(x, [name]).rounding[name]
    assert found.num_overflow == expected.num_overflow
    assert found.relative_error == pytest.approx(expected.relative_error, rel=1e-5)


@pytest.mark.parametrize("name", LOW)
def test_ties_go_to_even(name):
    """Halfway between neighbors, at the smallest number, and at the end of the range."""
    low = FORMATS[name]
    ties = [1 + low.eps / 2, 1 + 1.5 * low.eps, low.min_subnormal / 2, 1.5 * low.min_subnormal]
    ties.append(low.max + math.ldexp(1.0, low.max_exponent - low.mantissa_bits - 1))
    for tie in ties:
        x = torch.tensor([tie], dtype=torch.float64)
        as_float32 = x.float() if x.float().double() == x else x
        expected, found = directly(as_float32, name), tensor_numerics(as_float32, [name]).rounding[name]
        assert (found.num_overflow, found.relative_error) == (
            expected.num_overflow, pytest.approx(expected.relative_error)
        )  # fmt: skip


def test_what_a_format_has_is_rounded_without_error():
    x = torch.randn(100).to(torch.float8_e4m3fn)
    assert all(each.relative_error == 0 for each in tensor_numerics(x, ["bf16", "fp16", "fp8_e4m3"]).rounding.values())


def test_elements_that_overflow_are_counted_and_leave_the_error():
    x = torch.tensor([1e6, -1e6, 65519.0, 1 / 3, math.inf])
    found = tensor_numerics(x, ["fp16"]).rounding["fp16"]
    kept = directly(x[2:4], "fp16")
    assert found.num_overflow == 2
    assert found.relative_error == pytest.approx(kept.relative_error)


def test_extremes_and_what_is_not_finite():
    x = torch.tensor([-3.0, 2.0, 0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, -math.inf])
    found = tensor_numerics(x, ["bf16"])
    assert (found.minimum, found.maximum, found.histogram.max_abs) == (-3, 2, 3)
    assert (found.num_nan, found.num_inf, found.histogram.num_zero, found.num_elements) == (2, 3, 2, 9)
    assert found.histogram == exponent_histogram(x)


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(0, 3), torch.full((3,), math.nan), torch.zeros(2),
        torch.sparse_coo_tensor(size=(3,), check_invariants=True),
    ],
)  # fmt: skip
def test_nothing_to_round_is_no_error(x):
    found = tensor_numerics(x, LOW)
    assert (found.minimum, found.maximum, found.histogram.max_abs) == (0, 0, 0)
    assert all(each == Rounding() for each in found.rounding.values())
    assert found.rounding["fp16"].relative_error == 0


def test_a_requires_grad_tensor_leaves_no_graph():
    x = torch.randn(3, requires_grad=True)
    tensor_numerics(x * 2, LOW)
    assert x.grad is None


def test_an_expanded_tensor_is_its_copies():
    x = torch.tensor([[0.1], [1e6], [0.0]])
    repeated, expanded = tensor_numerics(x.repeat(1, 50), ["fp16"]), tensor_numerics(x.expand(3, 50), ["fp16"])
    assert expanded.histogram == repeated.histogram
    assert expanded.rounding["fp16"].num_overflow == 50
    assert expanded.rounding["fp16"].norm == pytest.approx(repeated.rounding["fp16"].norm)
    assert expanded.rounding["fp16"].error_norm == pytest.approx(repeated.rounding["fp16"].error_norm)


def test_a_sum_is_that_of_all_elements(monkeypatch):
    a, b = torch.randn(40) * 1e5, torch.cat([torch.randn(30), torch.tensor([math.nan, math.inf])])
    whole, parts = tensor_numerics(torch.cat([a, b]), LOW), tensor_numerics(a, LOW) + tensor_numerics(b, LOW)
    monkeypatch.setattr(pieces, "_CPU_PIECE", 7)
    for found in (parts, tensor_numerics(torch.cat([a, b]), LOW)):
        assert found.histogram == whole.histogram
        assert (found.minimum, found.maximum, found.num_nan) == (whole.minimum, whole.maximum, 1)
        for name in LOW:
            assert found.rounding[name].num_overflow == whole.rounding[name].num_overflow
            assert found.rounding[name].relative_error == pytest.approx(whole.rounding[name].relative_error)
    assert (whole.num_tensors, parts.num_tensors) == (1, 2)


def test_nothing_added_does_not_stretch_the_extremes():
    some, nothing = tensor_numerics(torch.tensor([2.0, 3.0]), ()), tensor_numerics(torch.empty(0), ())
    assert ((some + nothing).minimum, (nothing + some).maximum) == (2, 3)
    assert ((nothing + nothing).minimum, TensorNumerics().maximum) == (0, 0)


@pytest.mark.gpu
def test_a_gpu_says_the_same():
    x = torch.cat([wide(torch.float32).reshape(-1), torch.tensor([math.nan, math.inf, 0.0])])
    here, there = tensor_numerics(x, LOW), tensor_numerics(x.cuda(), LOW)
    assert (there.histogram, there.num_nan) == (here.histogram, here.num_nan)
    for name in LOW:
        assert there.rounding[name].num_overflow == here.rounding[name].num_overflow
        assert there.rounding[name].relative_error == pytest.approx(here.rounding[name].relative_error, rel=1e-5)
