"""FP32 by other kernels, told from faulty kernels by one step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Workload
from autoprec.measure import Training, compare
from autoprec.policy import Policy, preset
from autoprec.search.same_arithmetic import agreement, computes_in_fp32, settled

FP32 = preset("fp32", "cpu")
LAST, BF16 = preset("fp32-channels-last", "cpu"), preset("autocast-bf16", "cpu")
FUSED = replace(FP32, name="fused", optimizer="fused")


class Net(nn.Module):
    """A norm leaves the bias of its convolution no gradient but rounding; channels last, all is off by `fault`."""

    def __init__(self, fault: float = 1.0) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        is_last = self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return out * self.fault if is_last else out


def batches() -> Sequence[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 9, 9, generator=generator) for _ in range(4)]


def train(fault: float = 1.0) -> Any:
    workload = Workload(
        model=lambda: Net(fault),
        batches=batches,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )

    def start(policy: Policy, *, nudge: float = 0.0) -> Training:
        return Training(workload, policy, device="cpu", seed=0, batches=batches(), nudge=nudge)

    return start


def test_what_computes_in_fp32() -> None:
    assert computes_in_fp32(LAST)
    assert computes_in_fp32(FUSED)
    assert not computes_in_fp32(FP32), "strict FP32 has nothing to prove"
    assert not computes_in_fp32(BF16)
    assert not computes_in_fp32(replace(LAST, float32_matmul="bf16"))


@pytest.mark.parametrize("policy", [LAST, FUSED])
def test_another_order_of_sums_agrees(policy: Policy) -> None:
    found = agreement(train(), policy, "cpu")
    assert found.holds, found
    assert found.gradients < 1e-4
    assert found.updates_limit < 1e-3, "what Adam makes of rounding is left out"


def test_low_precision_and_faulty_kernels_do_not() -> None:
    assert not agreement(train(), BF16, "cpu").holds
    assert not agreement(train(fault=1.01), LAST, "cpu").holds
    assert not agreement(train(fault=float("nan")), LAST, "cpu").holds


def test_a_faulty_optimizer_is_seen_by_its_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    start = train()

    def doubled(policy: Policy, **nudge: float) -> Training:
        run = start(policy, **nudge)
        for group in run.optimizer.param_groups:
            group["lr"] *= 1 + (policy.optimizer == "fused")
        return run

    found = agreement(doubled, FUSED, "cpu")
    assert found.gradients <= found.gradients_limit
    assert not found.holds


# Noise of the size of what the curve falls: 40 steps tell nothing about one percent of them.
NOISY = [1 - 0.001 * step + 0.2 * ((7 * step) % 5 - 2) for step in range(40)]
OTHER = [loss + 0.1 * ((3 * step) % 7 - 3) for step, loss in enumerate(NOISY)]


def test_only_an_open_verdict_of_fp32_is_settled_by_the_first_step() -> None:
    open_ = compare(NOISY, OTHER)
    assert open_.verdict == "inconclusive"
    closed = settled(open_, train(), LAST, "cpu")
    assert closed.verdict == "faithful"
    assert closed.reason.startswith("faithful: computes in FP32 by other kernels, whose first gradients are within ")
    assert open_.reason in closed.reason
    assert closed.by_first_step
    assert replace(closed, verdict=open_.verdict, reason=open_.reason, by_first_step=False) == open_
    assert settled(open_, train(), BF16, "cpu") is open_
    assert settled(open_, train(fault=1.01), LAST, "cpu") is open_
    bad = compare(NOISY, [loss + 5 for loss in NOISY])
    assert bad.verdict == "unfaithful"
    assert settled(bad, train(), LAST, "cpu") is bad
