"""The numbers at a site, counted by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.site_numbers import SiteNumbers, site_numbers
from autoprec.capture import record
from autoprec.graph.site import Site
from autoprec.workload import Workload
from tests.unit.analysis.recorded import device_format, recorded, site

ONES = torch.ones(4)


def numbers(function: Callable[[Any, torch.Tensor], Any], x: torch.Tensor, where: str, fmt: LowFormat) -> SiteNumbers:
    return site_numbers(recorded(function, x, gain=torch.ones(x.shape[-1])), fmt, [site(where)])[site(where)]


def test_ranges_are_those_of_fp32_and_counts_those_of_the_format() -> None:
    x = torch.tensor([300.0, 7e4, -1e-9, 0.0, 2.0])
    found = numbers(lambda net, x: (x * net.gain).square().mean().sqrt(), x, "square#0", device_format("fp16"))
    assert (found.num_calls, found.num_outputs, found.raised) == (1, 5, "")
    assert (found.max_input, found.max_output) == (pytest.approx(7e4), pytest.approx(4.9e9))
    assert (found.num_inputs_over, found.num_flushed) == (1, 1)  # 7e4 becomes inf, 1e-9 becomes 0
    assert (found.num_nonfinite, found.num_zeroed) == (2, 1)  # 300^2 and inf; (1e-9)^2
    assert found.error == 0.0 or found.error < 1e-6  # of the three that are finite in both, all are exact
    assert not found.is_integer


def test_the_error_is_relative_to_the_norm_of_the_result() -> None:
    x = torch.tensor([1 + 2.0**-9, 3.0, 0.5, 1 / 3])
    found = numbers(lambda net, x: (x.exp() * net.gain).sum(), x, "exp#0", device_format("bf16"))
    right, low = x.exp().double(), x.bfloat16().exp().double()
    assert found.error == pytest.approx(float((low - right).norm() / right.norm()), rel=1e-6)


def test_cancellation_is_the_largest_input_over_what_is_left() -> None:
    x = torch.tensor([1000.0, 1001.0])
    found = numbers(lambda net, x: (x * net.gain - 999.0).sum(), x, "sub#0", device_format("fp16"))
    assert found.cancellation == pytest.approx(math.hypot(1000, 1001) / math.hypot(1, 2), rel=1e-6)
    other_shape = numbers(lambda net, x: (x * net.gain).sum(), x, "sum#0", device_format("fp16"))
    assert other_shape.cancellation == 0.0


@pytest.mark.parametrize(("small", "frac"), [(0.5, 0.5), (4.0, 0.0), (0.0, 0.0)])
def test_an_addend_under_half_a_spacing_is_swamped(small: float, frac: float) -> None:
    large = torch.tensor([256.0, 1.0])  # bf16 steps by 2 at 256 and by 2^-7 at 1
    found = numbers(
        lambda net, x: (x * net.gain + torch.full((2,), small)).sum(), large, "add#0", device_format("bf16")
    )
    assert found.swamped_frac == frac


def test_whole_numbers_are_told_from_others() -> None:
    counted = numbers(
        lambda net, x: (x * net.gain).cumsum(-1).mean(), torch.ones(300), "cumsum#0", device_format("bf16")
    )
    assert (counted.is_integer, counted.max_output) == (True, 300.0)
    assert counted.error > 0
    halves = numbers(lambda net, x: (x * net.gain).cumsum(-1).mean(), ONES / 2, "cumsum#0", device_format("bf16"))
    assert not halves.is_integer


def test_what_is_not_finite_in_fp32_either_does_not_count() -> None:
    def masked(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * net.gain).masked_fill(x == 0, -torch.inf).softmax(-1).square().sum()

    x = torch.tensor([0.0, 1.0, 2.0])
    fill = numbers(masked, x, "masked_fill#0", device_format("fp16"))
    assert (fill.num_nonfinite, fill.max_output, fill.num_outputs) == (0, 2.0, 3)
    found = numbers(masked, x, "softmax#0", device_format("fp16"))
    assert (found.num_nonfinite, found.num_inputs_over, found.max_input) == (0, 0, 2.0)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x * 1e4) * 100).square().mean().sqrt()


def test_all_calls_of_a_site_are_taken_together() -> None:
    recording = record(Workload(model=Twice, batches=lambda: [torch.ones(3, 2)], loss=lambda net, x: net(x)))
    inner = Site("inner", "linear", 0)
    found = site_numbers(recording, device_format("fp16"), [inner])[inner]
    assert (found.num_calls, found.num_outputs) == (2, 12)
    values: list[torch.Tensor] = []
    recording.replay(lambda node, value: values.append(value.detach()) if "linear" in node.name else None)
    assert found.max_output == max(float(each.abs().max()) for each in values)


def test_inputs_are_those_of_fp32_whatever_else_is_watched() -> None:
    def net(model: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x * model.gain).square() / 1e4).sum()

    x = torch.full((4,), 300.0)
    found = site_numbers(recorded(net, x, gain=ONES), device_format("fp16"), [site("square#0"), site("div#0")])
    assert found[site("square#0")].num_nonfinite == 4
    assert found[site("div#0")].max_input == 9e4  # not the inf that a low square gives
    assert found[site("div#0")].num_inputs_over == 4


def test_a_missing_kernel_is_told() -> None:
    try:
        torch.linalg.inv(torch.eye(2, dtype=torch.bfloat16))
        pytest.skip("this torch inverts matrices in bf16")
    except RuntimeError:
        pass
    recording = recorded(lambda net, x: torch.linalg.inv(net.gain).sum(), ONES, gain=torch.eye(4) * 2)
    (inverse,) = [each for each in recording.op_graph.sites() if "inv" in each.op]
    assert "BFloat16" in site_numbers(recording, device_format("bf16"), [inverse])[inverse].raised


def test_both_calls_draw_the_same_random_numbers() -> None:
    def dropped(net: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(nn.functional.dropout(x * net.gain, 0.5), 0.5).square().sum()

    recording = recorded(dropped, torch.ones(64), gain=torch.ones(64))
    drops = [each for each in recording.op_graph.sites() if each.op == "dropout"]
    first, second = (site_numbers(recording, device_format("bf16"), drops)[each] for each in drops)
    assert (first.max_output, second.max_output, first.num_zeroed) == (2.0, 4.0, 0)
    values: list[torch.Tensor] = []
    recording.replay(lambda node, value: values.append(value.detach()) if "dropout" in node.name else None)
    assert second.max_output == float(values[-1].max())


def test_sites_that_did_not_run_have_no_numbers() -> None:
    recording = recorded(lambda net, x: (x * net.gain).sum(), ONES, gain=ONES)
    assert site_numbers(recording, device_format("bf16"), [site("exp#0")]) == {}
