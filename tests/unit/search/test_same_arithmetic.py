"""FP32 by other kernels, told from faulty kernels by one step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Workload
from autoprec.measure import Training, compare
from autoprec.policy import Policy, preset
from autoprec.search.same_arithmetic import agreement, computes_in_fp32, drifts_as_chaos, settled

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


def faulty(**changed: float) -> Any:
    """Return what starts runs whose fused optimizer steps with other settings than it was given."""
    start = train()

    def changing(policy: Policy, **nudge: float) -> Training:
        run = start(policy, **nudge)
        for group in run.optimizer.param_groups if policy.optimizer == "fused" else ():
            group.update({name: value * group[name] if name == "lr" else value for name, value in changed.items()})
        return run

    return changing


@pytest.mark.parametrize(
    "changed",
    [{"lr": 1.001}, {"eps": 1e-5}, {"weight_decay": 0.0}, {"weight_decay": 0.011}, {"betas": (0.9, 0.9991)}],
)
def test_a_faulty_optimizer_is_seen_by_its_updates(changed: dict[str, Any]) -> None:
    found = agreement(faulty(**changed), FUSED, "cpu")
    assert found.gradients <= found.gradients_limit
    assert not found.holds


def test_a_frozen_layer_is_seen_by_its_gradients_or_its_updates() -> None:
    start = train()

    def frozen(policy: Policy, *, by: str, **nudge: float) -> Training:
        run = start(policy, **nudge)
        bias = run.model.get_parameter("head.bias")
        if policy.optimizer == "fused" and by == "zeros":
            bias.register_hook(torch.zeros_like)
        elif policy.optimizer == "fused" and by == "no gradient":
            bias.requires_grad_(False)
        elif policy.optimizer == "fused":
            group = run.optimizer.param_groups[0]
            group["params"] = [each for each in group["params"] if each is not bias]
        return run

    assert not agreement(partial(frozen, by="zeros"), FUSED, "cpu").holds
    assert not agreement(partial(frozen, by="no gradient"), FUSED, "cpu").holds
    found = agreement(partial(frozen, by="left out"), FUSED, "cpu")
    assert found.gradients <= found.gradients_limit
    assert found.updates == 1.0


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
    assert settled(closed, train(), LAST, "cpu") is closed


def test_an_unfaithful_verdict_is_settled_only_where_chaos_drifts_as_far() -> None:
    bad = compare(NOISY, [loss + 5 for loss in NOISY])
    assert bad.verdict == "unfaithful"
    assert settled(bad, train(), LAST, "cpu") is bad
    assert settled(bad, train(), LAST, "cpu", is_chaotic=lambda: False) is bad
    found = settled(bad, train(), LAST, "cpu", is_chaotic=lambda: True)
    assert found.verdict == "faithful"
    assert found.reason.endswith(f"the curves alone are {bad.reason}, and FP32 nudged by one rounding drifts as far")
    assert settled(bad, train(fault=1.01), LAST, "cpu", is_chaotic=lambda: True) is bad
    assert settled(bad, faulty(weight_decay=0.0), FUSED, "cpu", is_chaotic=lambda: True) is bad
    assert settled(bad, train(), BF16, "cpu", is_chaotic=lambda: True) is bad


def test_a_drift_is_chaos_if_it_is_not_far_beyond_what_a_nudge_does() -> None:
    nudged = [loss + 0.1 * (-1) ** step for step, loss in enumerate(NOISY)]
    assert drifts_as_chaos(NOISY, [loss + 0.3 for loss in NOISY], nudged)
    assert drifts_as_chaos(NOISY, [loss + 0.3 for loss in NOISY[:20]], nudged), "as far as it was trained"
    assert drifts_as_chaos(NOISY, [9.0] * 20 + NOISY[20:], nudged), "the first half is not looked at"
    assert not drifts_as_chaos(NOISY, [loss + 0.5 for loss in NOISY], nudged)
    assert not drifts_as_chaos(NOISY, [loss + 1e-6 for loss in NOISY], NOISY)
    assert not drifts_as_chaos(NOISY, [*NOISY[:-1], float("nan")], nudged)
