import pytest
import torch
from torch import nn

from autoprec.analysis.short_run import ShortRun, short_run
from autoprec.analysis.stored_buffers import statistic_faults
from autoprec.workload import Workload
from tests.unit.analysis.stored_runs import only

FORMATS = ("fp16", "bf16")


class Averages(nn.Module):
    """A buffer that follows the batch with a momentum, written in no module of torch's."""

    def __init__(self, momentum: float, start: float) -> None:
        super().__init__()
        self.weight, self.momentum = nn.Parameter(torch.ones(2)), momentum
        self.register_buffer("seen", torch.full((2,), start))
        self.register_buffer("untouched", torch.ones(2))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(1 - self.momentum).add_(self.momentum * x)
            self.count += 1
        return self.weight * x


def run(momentum: float, target: float = 3.0, start: float = 1.0) -> ShortRun:
    workload = Workload(
        model=lambda: Averages(momentum, start), batches=lambda: [torch.full((2,), target)],
        loss=lambda model, x: model(x).sum(), optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    )  # fmt: skip
    return short_run(workload, [torch.full((2,), target)], device="cpu", seed=0)


def test_only_what_a_forward_pass_writes_to_is_followed_and_its_momentum_is_measured() -> None:
    found = {each.name: each.decay for each in run(0.01).buffers}
    assert set(found) == {"seen", "count"}
    assert found["seen"] == pytest.approx(0.99, abs=1e-6)
    assert found["count"] is None  # it keeps all of an offset: a counter


@pytest.mark.parametrize("momentum", [1e-3, 2.0**-9, 0.01, 0.1])
def test_a_statistic_stalls_where_its_update_is_half_a_spacing(momentum: float) -> None:
    """It stays at 1 on its way to 3 if 2 * momentum is at most half of bf16's spacing there, 2**-8."""
    fault = only(list(statistic_faults(run(momentum), ("bf16",))), "bf16", "seen")
    assert (fault.numbers["stays_frac"] == 1) == (2 * momentum <= 2.0**-8)
    # Otherwise it ends within a half spacing over momentum of 3, or where FP32 ends: after 2 time constants 13 % short.
    if momentum == 0.1:
        assert (fault.verdict, fault.numbers["error"] < 2.0**-7 / 0.1 / 3) == ("fine", True)
    if momentum <= 2.0**-9:
        assert fault.verdict == "needs_fp32"
        assert fault.numbers["missed_way_frac"] == pytest.approx(1)


def test_a_statistic_that_is_where_it_belongs_is_no_fault_though_nothing_moves_it() -> None:
    fault = only(list(statistic_faults(run(1e-3, target=1.02), ("bf16",))), "bf16", "seen")
    assert (fault.numbers["stays_frac"], fault.verdict) == (1, "fine")


def test_a_counter_is_judged_by_the_passes_that_were_seen() -> None:
    fault = only(list(statistic_faults(run(0.1), FORMATS)), "bf16", "count")
    assert (fault.verdict, fault.numbers["lost_update_frac"]) == ("fine", 0)


def test_averages_of_weights_are_left_out() -> None:
    assert {each.name for each in statistic_faults(run(0.1), FORMATS, averaged={"seen"})} == {"count"}
