"""What runs in a low format, and with which kernels."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autoprec.analysis.low_format import low_format
from autoprec.analysis.low_step import damage
from tests.unit.analysis.recorded import device_format, format_of, recorded, referred


def test_without_units_only_what_units_compute_is_ideal() -> None:
    fmt = format_of("bf16", "device")
    recording = recorded(
        lambda net, x: F.layer_norm(F.linear(x, net.weight), (4,)).exp().sum(),
        torch.ones(6, 8),
        weight=torch.ones(4, 8),
    )
    actions = {node.op: fmt.action(node) for node in recording.op_graph.calls()}
    assert actions == {"linear": "ideal", "layer_norm": torch.bfloat16, "exp": torch.bfloat16, "sum": torch.bfloat16}
    native = device_format("bf16")
    assert {native.action(node) for node in recording.op_graph.calls()} == {torch.bfloat16}


def product(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, net.weight).square().sum()


def test_fp8_takes_matrix_products_whose_sizes_it_has_kernels_for() -> None:
    pytest.importorskip("torchao")
    fmt = low_format("fp8_e4m3", "cpu", ())
    whole = recorded(product, torch.randn(16, 32), weight=torch.randn(16, 32)).op_graph
    odd = recorded(product, torch.randn(16, 30), weight=torch.randn(16, 30)).op_graph
    assert [fmt.can_run(node) for node in whole.calls()] == [True, False, False]
    assert not any(fmt.can_run(node) for node in odd.calls())


def test_fp8_rounds_operands_to_three_bits() -> None:
    pytest.importorskip("torchao")
    fmt, signs = low_format("fp8_e4m3", "cpu", ()), torch.randn(16, 32).sign()
    # A scaled number of the largest magnitude is 448 itself: operands of one magnitude lose nothing.
    exact = referred(product, signs, weight=torch.randn(16, 32).sign())
    assert damage(exact, fmt, exact.recording.op_graph.sites()).loss_error == 0.0
    rounded = referred(product, torch.rand(16, 32) + 1, weight=torch.rand(16, 32) + 1)
    error = damage(rounded, fmt, rounded.recording.op_graph.sites()).gradient_error
    assert 2.0**-9 < error < 2.0**-3  # each of three operands is off by at most 2^-4 of itself, on average by much less
