from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoprec.analysis.forward_overflow import forward_overflows
from autoprec.capture import Recording, record
from autoprec.workload import Workload

FORMATS = ("fp16", "bf16", "fp8_e4m3")


def recording(forward: Callable[[torch.Tensor], torch.Tensor], *values: float) -> Recording:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self.weight * x)

    return record(
        Workload(model=Net, batches=lambda: [torch.tensor([values])], loss=lambda net, x: net(x).sum())
    )  # fmt: skip


def sites(forward: Callable[[torch.Tensor], torch.Tensor], *values: float) -> list[str]:
    found = forward_overflows((recording(forward, *values),), FORMATS)
    assert found["bf16"] == found["fp8_e4m3"] == ()
    return [str(site) for site in found["fp16"]]


@pytest.mark.parametrize(("value", "overflows"), [(65504.0, False), (65519.0, False), (65520.0, True), (-7e4, True)])
def test_an_input_beyond_the_range_overflows_where_it_is_read(value: float, overflows: bool) -> None:
    """65519 rounds down to the largest number, 65504; 65520 is the tie that rounds to infinity."""
    assert sites(lambda x: x * 1e-3, value, 1.0) == ([":mul#0"] if overflows else [])


def test_the_origin_is_named_and_not_what_comes_after() -> None:
    assert sites(lambda x: (x * 300 * 300) * 1e-3 + 1, 1.0) == [":mul#2"]


def test_an_overflow_that_does_not_reach_the_loss_is_none() -> None:
    assert sites(lambda x: torch.where(x > 0, x, -1e9).softmax(-1), 1.0, -1.0) == []


def test_an_overflow_that_becomes_nan_is_one() -> None:
    assert sites(lambda x: torch.where(x > 0, x, -1e9).softmax(-1), -1.0, -2.0) == [":where#0"]


def test_the_largest_number_of_fp32_stands_for_that_of_the_format() -> None:
    lowest = torch.finfo(torch.float32).min
    assert sites(lambda x: torch.where(x > 0, x, lowest).softmax(-1), -1.0, -2.0) == []


def test_ops_that_stay_fp32_by_default_overflow_nowhere() -> None:
    assert sites(lambda x: (x.exp() * 0.0).sum(), 12.0) == [":mul#1"]  # exp is one; what reads its result is not


def test_every_recording_counts() -> None:
    made = [recording(lambda x: x * 2, value) for value in (1.0, 4e4)]
    assert [str(site) for site in forward_overflows(made, ("fp16",))["fp16"]] == [":mul#1"]
