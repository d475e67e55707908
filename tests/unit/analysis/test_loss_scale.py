import math

import pytest
import torch
from torch import nn

from autoprec.analysis.histogram import ExponentHistogram, exponent_histogram
from autoprec.analysis.loss_scale import (
    GradientHistograms,
    flush_exponent,
    largest_scale,
    loss_scale_advice,
    rounding_error,
    run_backward,
    smallest_scale,
)
from autoprec.capture import record
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS
from autoprec.workload import Workload


def gradients(parameter: list[float], activation: list[float] | None = None) -> GradientHistograms:
    return GradientHistograms(
        parameters={"weight": exponent_histogram(torch.tensor(parameter, dtype=torch.float64))},
        activations={"mid:linear#0": exponent_histogram(torch.tensor(activation or [1.0], dtype=torch.float64))},
    )


def test_what_flushes_in_fp16_is_below_2_to_the_minus_25() -> None:
    """The smallest fp16 number is 2**-24; half of it is a tie, which goes to even, to 0."""
    assert flush_exponent(FORMATS["fp16"]) == -25
    assert torch.tensor(2.0**-25).half() == 0
    assert torch.tensor(1.01 * 2.0**-25).half() > 0
    assert flush_exponent(FORMATS["bf16"]) == -134


def test_fractions_without_and_with_the_scale() -> None:
    # 2**-26 and 2**-30 flush, 2**-20 is subnormal (below 2**-14), 2**-3 and 2**-4 are normal.
    advice = loss_scale_advice(gradients([2.0**-26, 2.0**-30, 2.0**-20, 2.0**-3, 2.0**-4, 0.0]), "fp16")
    assert advice.flush_frac == 2 / 5
    assert advice.subnormal_frac == 3 / 5
    assert advice.max_abs == 2.0**-3
    # The largest gradient is the activation's 1; 65504 / 8 / 1 = 8188, below which 4096 is the last power of two.
    assert advice.initial == 4096
    # With 2**12 only what is below 2**-37 flushes.
    assert advice.scaled_flush_frac == 0


@pytest.mark.parametrize(
    ("max_abs", "scale"),
    [(1.0, 4096), (8188.0, 1), (8188.1, 0.5), (0.5, 8192), (3.0, 2048), (1e-9, 2**24), (0.0, 2**24)],
)
def test_the_scale_keeps_a_factor_of_eight_free(max_abs: float, scale: float) -> None:
    assert largest_scale(max_abs, FORMATS["fp16"]) == scale


def test_a_scale_is_needed_where_a_gradient_loses_its_norm_not_where_small_elements_vanish() -> None:
    many_small = loss_scale_advice(gradients([1.0], [2.0**-30] * 99 + [1.0]), "fp16")
    all_small = loss_scale_advice(gradients([1.0], [2.0**-30] * 99), "fp16")
    assert (many_small.needed, all_small.needed) == (False, True)
    assert all_small.lost == (("mid:linear#0", 1.0),)


def test_parameters_alone_can_need_it() -> None:
    assert loss_scale_advice(gradients([2.0**-30], [1.0]), "fp16").needed


def test_bf16_needs_none() -> None:
    assert not loss_scale_advice(gradients([2.0**-30], [2.0**-40]), "bf16").needed


def test_a_gradient_beyond_the_range_does_not_push_the_scale_down() -> None:
    advice = loss_scale_advice(gradients([1.0], [1e6, 1.0]), "fp16")
    assert advice.overflowing == ("mid:linear#0",)
    assert advice.initial == 4096


def test_sites_are_listed_with_the_worst_first() -> None:
    found = GradientHistograms(
        parameters={},
        activations={
            "a": ExponentHistogram(counts=((-26, 1), (-25, 1)), max_abs=2.0**-25),
            "b": ExponentHistogram(counts=((-30, 1),), max_abs=2.0**-30),
        },
    )
    advice = loss_scale_advice(found, "fp16")
    assert advice.lost == (("b", 1.0), ("a", pytest.approx(math.sqrt(1 / 5))))
    assert advice.flush_frac == 0


class Chain(nn.Module):
    """loss = (w2 * (w1 * x)).sum() * 2**-30."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2 * (self.w1 * x)


def test_one_backward_pass_gives_the_gradients_of_parameters_and_activations() -> None:
    workload = Workload(
        model=Chain, batches=lambda: [torch.ones(8)], loss=lambda model, x: model(x).sum() * 2.0**-30
    )  # fmt: skip
    recording = record(workload)
    found = run_backward((recording,))
    # d/dw2 = 8 * 2 * 2**-30 = 2**-26; d/dw1 = 8 * 4 * 2**-30 = 2**-25; d/dy = 2**-30; d/d(w1 x) = 4 * 2**-30
    assert {name: each.counts for name, each in found.parameters.items()} == {"w1": ((-25, 1),), "w2": ((-26, 1),)}
    assert {site: each.counts for site, each in found.activations.items()} == {
        ":mul#0": ((-28, 8),), ":mul#1": ((-30, 8),),
    }  # fmt: skip
    assert recording.model.w1.grad.item() == 2.0**-25
    assert loss_scale_advice(found, "fp16").needed


def test_a_module_called_twice_counts_both_gradients() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x))

    workload = Workload(
        model=Twice, batches=lambda: [torch.ones(3, 2)], loss=lambda model, x: model(x).sum()
    )  # fmt: skip
    found = run_backward((record(workload),)).activations["linear:linear#0"]
    assert found.num_nonzero + found.num_zero == 2 * 3 * 2


def test_gradients_of_several_batches_count_together() -> None:
    def recording(size: float) -> object:
        return record(
            Workload(model=Chain, batches=lambda: [torch.full((8,), size)], loss=lambda model, x: model(x).sum())
        )

    found = run_backward((recording(1.0), recording(64.0)))
    assert found.parameters["w2"].counts == ((4, 1), (10, 1))  # 8 * 2 * size
    assert found.activations[":mul#0"].num_nonzero == 16
    # The largest gradient is d/dw1 = 8 * 4 * 64 = 2048; 65504 / 8 / 2048 is just below 4.
    assert loss_scale_advice(found, "fp16").initial == 2


def test_the_expected_rounding_error_is_that_of_rounding() -> None:
    """Elements evenly in the logarithm, over many binades and down into the subnormals of the format."""
    values = 2.0 ** torch.linspace(-30, -4, 200_001, dtype=torch.float64)
    for exponent, fmt, dtype in ((0, "fp16", torch.float16), (-6, "fp16", torch.float16), (0, "bf16", torch.bfloat16)):
        scaled = values * 2.0**exponent
        rounded = scaled.to(dtype).double()
        found = float((rounded - scaled).norm() / scaled.norm())
        expected = rounding_error(exponent_histogram(values), FORMATS[fmt], exponent)
        # uniform errors are a model, and the highest bin, where the norm is, holds only its lower end
        assert expected == pytest.approx(found, rel=0.25), (exponent, fmt)


def test_the_smallest_scale_keeps_all_gradients_and_half_of_it_does_not() -> None:
    histograms = [exponent_histogram(torch.full((10,), 1.3 * 2.0**-30)), exponent_histogram(torch.ones(10))]
    low = FORMATS["fp16"]
    scale = smallest_scale(histograms, low)
    exponent = round(math.log2(scale))
    assert rounding_error(histograms[0], low, exponent) <= 0.05 + low.unit_roundoff
    assert rounding_error(histograms[0], low, exponent - 1) > 0.05 + low.unit_roundoff
    assert smallest_scale(histograms, FORMATS["bf16"]) == 1


def test_bounds_that_cross_say_that_no_one_scale_serves() -> None:
    spread = loss_scale_advice(gradients([1e4], [2.0**-40] * 9), "fp16")
    assert (spread.needed, spread.fits) == (True, False)
    assert spread.maximum == 4  # 4e4 is in range, 8e4 is not
    assert loss_scale_advice(gradients([1.0], [1.0]), "fp16").fits


@pytest.mark.parametrize(("room", "interval"), [(8, 2000), (4, 2000), (3, 1000), (1, 250), (0, 125)])
def test_a_scale_with_little_room_grows_back_sooner(room: int, interval: int) -> None:
    # `initial` is 4096; what needs 4096 / 2**room has its only gradient so far down.
    for shift in range(-40, 0):
        advice = loss_scale_advice(gradients([1.0], [2.0**shift]), "fp16")
        if advice.minimum == 4096 / 2**room:
            assert advice.growth_interval == interval
            return
    raise AssertionError("no gradient needs such a scale")


def test_fp8_tensors_carry_the_scale_themselves() -> None:
    advice = loss_scale_advice(gradients([2.0**-30, 2.0**-31, 2.0**-63], [2.0**-40]), "fp8_e5m2")
    assert (advice.needed, advice.per_tensor, advice.initial, advice.lost) == (False, True, 1.0, ())
    assert advice.flush_frac == 1
    assert advice.scaled_flush_frac == pytest.approx(1 / 3)  # e5m2 reaches from 2**15 down to 2**-17


def test_sites_that_overflow_in_the_forward_pass_are_passed_on() -> None:
    advice = loss_scale_advice(gradients([1.0]), "fp16", (Site("income.0", "linear", 0),))
    assert advice.forward_overflow == ("income.0:linear#0",)


def test_gradients_that_the_loss_takes_itself_are_measured() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    found = run_backward((record(Workload(model=Chain, batches=lambda: [torch.ones(8)], loss=loss)),))
    assert (found.inner.counts, found.inner.max_abs) == (((3, 8),), 8.0)  # d/dx = w2 * w1
    assert loss_scale_advice(found, "fp16").inner_max_abs == 8
