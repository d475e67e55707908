import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autoprec.analysis.ema import average_faults, average_moves, weight_averages
from autoprec.analysis.short_run import ShortRun, short_run
from autoprec.workload import Workload
from tests.unit.analysis.stored_runs import run_of, sgd


class Averaged(nn.Module):
    def __init__(self, decay: float) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Momentum(nn.Module):
    """A key encoder that follows the query encoder in forward, as in momentum contrast."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay, self.query = decay, nn.Linear(3, 2)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(self.decay).add_(query, alpha=1 - self.decay)
        return self.query(x) * self.key(x)


def run(model: type[nn.Module], decay: float, lr: float = 0.1) -> tuple[nn.Module, ShortRun]:
    workload = Workload(
        model=lambda: model(decay), batches=lambda: [torch.ones(4, 3)], loss=lambda net, x: net(x).square().sum(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
    )  # fmt: skip
    torch.manual_seed(0)
    return model(decay), short_run(workload, [torch.ones(4, 3)], device="cpu", seed=0)


@pytest.mark.parametrize(("model", "prefix", "source"), [(Averaged, "ema.module", "net"), (Momentum, "key", "query")])
def test_an_average_in_the_model_is_found_with_its_decay(model: type[nn.Module], prefix: str, source: str) -> None:
    (found,) = weight_averages(*_of(model))
    assert (found.prefix, found.source) == (prefix, source)
    assert found.decay == pytest.approx(0.99, abs=1e-6)
    assert found.pairs == {f"{prefix}.{name}": f"{source}.{name}" for name in ("weight", "bias")}


def _of(model: type[nn.Module]) -> tuple[nn.Module, tuple]:
    fresh, made = run(model, 0.99)
    return fresh, made.buffers


def test_a_frozen_copy_that_nothing_moves_is_no_average() -> None:
    class Frozen(Momentum):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query(x) * self.key(x)

    assert weight_averages(*_of(Frozen)) == ()


def test_an_average_stalls_if_its_decay_is_too_near_to_one() -> None:
    fresh, made = run(Momentum, 0.999, lr=1e-3)
    faults = list(average_faults(made, weight_averages(fresh, made.buffers), ("bf16",)))
    assert {each.name for each in faults if each.verdict == "needs_fp32"} == {"key.weight", "key.bias"}


def test_a_step_that_is_large_enough_moves_an_average() -> None:
    # The average of 1 moves by (1 - decay) * 1 in the first step: 2**-3 for 0.875, and half a spacing is 2**-8.
    made = run_of([1.0], [[-1.0]], sgd(1.0))
    moves = {(each.decay, each.format): each for each in average_moves(made, ("bf16", "fp16"))}
    assert moves[0.9, "bf16"].lost_update_frac == 0
    assert moves[0.9999, "bf16"].lost_update_frac == 1
    assert moves[0.9999, "fp16"].lost_update_frac == 1  # 1e-4 to 3e-4 are below 2**-11
    assert moves[0.999, "fp16"].lost_update_frac == 0
    assert moves[0.999, "bf16"].needed_difference == pytest.approx(2.0**-8 / 1e-3)
