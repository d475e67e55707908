"""Kernels of this device that get a gradient wrong, told from rounding."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autoprec.analysis.kernel_faults import WRONG, KernelFault, _is_kernels_fault, kernel_faults
from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import Reference
from tests.unit.analysis.recorded import device_format, format_of, referred, site

ROWS, WIDTH = 4096, 8


def normed(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (F.layer_norm(x, (WIDTH,), net.gain, net.shift) * (1 + x.sign() / 4)).mean()


def reference(rows: int = ROWS) -> Reference:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
    return referred(normed, x, gain=torch.ones(WIDTH), shift=torch.zeros(WIDTH))


def faults(step: Reference, fmt: LowFormat) -> tuple[KernelFault, ...]:
    return kernel_faults(step, fmt, step.recording.op_graph.sites(), 1.0)


def bias_error(rows: int) -> float:
    """Return how wrong this torch gets the gradient of a layer norm's bias, a sum of equal numbers over the rows."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.zeros(WIDTH, requires_grad=True)
    normed = F.layer_norm(x, (WIDTH,), torch.ones(WIDTH), bias)
    (gradient,) = torch.autograd.grad(normed, bias, torch.full_like(normed, 2.0**-12))
    return float((gradient - rows * 2.0**-12).norm() / (rows * 2.0**-12 * WIDTH**0.5))


needs_the_fault = pytest.mark.skipif(
    bias_error(ROWS) < 2 * WRONG, reason="this torch sums the gradients of a layer norm's parameters in FP32"
)


@needs_the_fault
def test_a_norm_that_sums_its_gradient_in_bf16_is_named() -> None:
    found = faults(reference(), device_format("bf16"))
    assert "shift" in {each.parameter for each in found}  # all terms of its sum are equal: it stalls
    for each in found:
        assert (each.site, each.format, each.numel) == (site("layer_norm#0"), "bf16", ROWS * WIDTH)
        assert each.error > WRONG
        assert each.alone > WRONG
        assert each.ideal_error < WRONG / 4


@needs_the_fault
def test_a_site_that_is_not_asked_about_is_not_named() -> None:
    step = reference()
    others = [each for each in step.recording.op_graph.sites() if each.op != "layer_norm"]
    assert kernel_faults(step, device_format("bf16"), others, 1.0) == ()


def test_kernels_that_compute_in_fp32_have_no_fault() -> None:
    assert faults(reference(), format_of("bf16")) == ()


def test_a_sum_over_few_rows_has_no_fault() -> None:
    assert faults(reference(16), device_format("bf16")) == ()


def test_where_a_gradient_is_not_finite_there_is_nothing_to_compare() -> None:
    step = referred(lambda net, x: (x * net.gain).square().sum(), torch.full((4,), 300.0), gain=torch.ones(4))
    assert faults(step, device_format("fp16")) == ()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault(name: str) -> None:
    def centered(net: Any, x: torch.Tensor) -> torch.Tensor:  # what follows takes the mean away, and with it the bias
        return (
            F.batch_norm(F.layer_norm(x, (WIDTH,), None, net.shift), None, None, training=True).relu().square().mean()
        )

    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))
    step = referred(centered, x, shift=torch.zeros(WIDTH))
    assert float(step.gradients[0].abs().max()) < 1e-6
    assert faults(step, device_format(name)) == ()


@pytest.mark.parametrize(
    ("error", "ideal_error", "is_fault"),
    [(0.25, 0.01, True), (0.15, 0.0, False), (0.3, 0.1, False), (900.0, 140.0, False), (math.inf, 0.01, True)],
)
def test_what_separates_a_kernel_from_rounding(error: float, ideal_error: float, is_fault: bool) -> None:
    assert _is_kernels_fault(error, ideal_error) is is_fault


def test_rounding_that_every_kernel_has_is_no_fault_of_this_one() -> None:
    def cancels(net: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x * net.gain + 100) - 100).square().sum()

    step = referred(cancels, torch.linspace(0.1, 0.2, 8), gain=torch.ones(8))
    fmt = device_format("bf16")
    assert faults(step, fmt) == ()
    assert math.isfinite(step.loss)
