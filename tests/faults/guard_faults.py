"""Faults planted in guarded runs: one row each, with the detector that is meant to catch it.

`plant()` runs a loop that goes wrong in this one way and returns detector and reaction of every event, in order; for
a fault that is refused before a step is taken, the error counts as the event ("refused", "stop").
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.errors import GuardError
from autoprec.policy import LossScale, Parameters
from tests.faults.guarded import BAND, Batch, Loop, batch_at, loss_of, net, policy_of
from tests.two_ranks import PAIR

Found = Sequence[tuple[str, str]]
DYNAMIC = LossScale(kind="dynamic", initial=1024.0, growth_interval=50)
FACTS = {"flush_frac": 0.05, "layer_flush_frac": 0.2, "overflow_frac": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A planted fault, the detector meant to catch it, and the gravest reaction that is expected of it."""

    name: str
    planted: str
    detector: str
    reaction: str
    plant: Callable[[], Found]


class Exploding(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf


def loud(step: int, factor: float = 1e6) -> Batch:
    x, y = batch_at(step)
    return x * factor, y


def overflow_at_40() -> Found:
    loop = Loop(policy_of("fp16", scale=DYNAMIC)).train(40)
    for step in range(40, 44):
        loop.step(loud(step))
    return loop.findings


def overflow_without_scaling() -> Found:
    loop = Loop(policy_of("fp16")).train(10)
    for step in range(10, 14):
        loop.step(loud(step))
    return loop.findings


def site_that_only_the_fallback_mends() -> Found:
    loop = Loop(policy_of("fp16", low="*"), loss=None).train(4)
    loop.loss_of = lambda model, batch: (
        loss_of(model, batch) * (1 if loop.guard.policy.rules[-1].format == "fp32" else torch.inf)
    )
    for step in range(4, 16):
        loop.step(batch_at(step))
    return loop.findings


def underflow_growing() -> Found:
    policy = policy_of("fp16", scale=LossScale(kind="static", initial=16.0), calibration=FACTS)
    loop = Loop(policy, lr=1e-4)
    for step in range(60):
        factor = 0.8**step
        loop.loss_of = lambda model, batch, factor=factor: loss_of(model, batch) * factor
        loop.step(batch_at(step))
    return loop.findings


def near_the_end() -> Found:
    policy = policy_of("fp16", scale=LossScale(kind="static", initial=2.0**13), calibration=FACTS)
    loop = Loop(policy, lr=1e-4)
    for step in range(20):
        loop.loss_of = lambda model, batch: loss_of(model, batch) * 4
        loop.step(batch_at(step))
    return loop.findings


def nan_batch() -> Found:
    loop = Loop(policy_of("bf16")).train(8)
    x, y = batch_at(8)
    x[0, 0] = torch.nan
    loop.step((x, y))
    loop.train(6)
    return loop.findings


def only_nan_batches() -> Found:
    loop = Loop(policy_of("bf16")).train(8)
    with contextlib.suppress(GuardError):
        for step in range(20):
            loop.step((batch_at(step)[0] * torch.nan, batch_at(step)[1]))
    return loop.findings


def infinite_loss_with_finite_gradients() -> Found:
    loop = Loop(policy_of("bf16")).train(8)
    loop.loss_of = lambda model, batch: loss_of(model, batch) + torch.inf
    loop.step(batch_at(8))
    return loop.findings


def infinite_gradient_of_a_finite_loss() -> Found:
    loop = Loop(policy_of("bf16")).train(8)
    loop.loss_of = lambda model, batch: Exploding.apply(loss_of(model, batch))
    for step in range(8, 12):
        loop.step(batch_at(step))
    return loop.findings


def scale_collapse() -> Found:
    loop = Loop(policy_of("fp16", scale=LossScale(kind="dynamic", initial=16.0, minimum=1.0))).train(8)
    loop.loss_of = lambda model, batch: Exploding.apply(loss_of(model, batch))
    for step in range(8, 16):
        loop.step(batch_at(step))
    return loop.findings


def static_scale_too_large() -> Found:
    loop = Loop(policy_of("fp16", scale=LossScale(kind="static", initial=2.0**22, maximum=2.0**22))).train(6)
    return loop.findings


def one_step_in_four_skipped() -> Found:
    loop = Loop(policy_of("fp16", scale=DYNAMIC))
    for step in range(110):
        loop.loss_of = (lambda m, b: Exploding.apply(loss_of(m, b))) if step % 4 == 3 else loss_of
        loop.step(batch_at(step))
    return loop.findings


def scaler_not_restored() -> Found:
    loop = Loop(policy_of("fp16", scale=LossScale(kind="dynamic", initial=256.0, growth_interval=3))).train(8)
    states = loop.model.state_dict(), loop.optimizer.state_dict(), loop.guard.state_dict()
    again = Loop(policy_of("fp16", scale=LossScale(kind="dynamic", initial=256.0, growth_interval=3)))
    for part, state in zip((again.model, again.optimizer, again.guard), states, strict=True):
        part.load_state_dict(state)
    again.step(batch_at(8))
    return again.findings


def frozen_gains() -> Found:
    policy = policy_of("bf16", low="*", parameters=Parameters(storage="bf16"))
    return Loop(policy, lr=1e-3).train(12).findings


def weights_broken_beside() -> Found:
    loop = Loop(policy_of("bf16")).train(14)
    with torch.no_grad():
        loop.model[3].bias.fill_(torch.nan)
    loop.step(batch_at(14))
    return loop.findings + loop.train(6).findings


def update_of_nothing_over_nothing() -> Found:
    """Adam with an eps of 0 divides 0 by 0 where a gradient has always been 0."""
    model = net()
    nn.init.zeros_(model[3].weight)
    policy = policy_of("bf16")
    loop = Loop(policy, model=model, kind=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, eps=0.0))
    with contextlib.suppress(GuardError):
        loop.train(10)  # no gradient reaches the first layers
    return loop.findings


def beyond_the_end_of_fp16() -> Found:
    """A bias of 65472, whose master each step takes further up."""
    loop = Loop(policy_of("fp32", low="*", parameters=Parameters(storage="fp16", master="fp32")), kind=torch.optim.Adam)
    loop.train(4)
    with torch.no_grad():
        loop.model[3].bias.fill_(65472.0)
    loop.optimizer.param_groups[0]["lr"] = 1000.0
    for _ in range(4):
        for each in loop.model.parameters():
            each.grad = torch.zeros_like(each, dtype=each.grad_dtype)
        loop.model[3].bias.grad.fill_(-1.0)
        loop.guard.step(torch.ones(()))
    return loop.findings


def divergence() -> Found:
    loop = Loop(policy_of("bf16", calibration={"losses": BAND})).train(60)
    for group in loop.optimizer.param_groups:
        group["lr"] = 2.0
    loop.train(30)
    return loop.findings


def broken_again_and_again() -> Found:
    loop = Loop(policy_of("bf16")).train(12)
    with contextlib.suppress(GuardError):
        for _ in range(40):
            with torch.no_grad():
                loop.model[0].weight.fill_(torch.inf)
            loop.step(batch_at(len(loop.losses)))
    return loop.findings


def other_policy() -> Found:
    state = Loop(policy_of("bf16")).train(2).guard.state_dict()
    return _refused(lambda: Loop(policy_of("fp16")).guard.load_state_dict(state))


def unreadable_calibration() -> Found:
    return _refused(lambda: Loop(policy_of("bf16", calibration={"losses": {"steps": [0.0]}})))


def other_model() -> Found:
    return _refused(lambda: Loop(policy_of("bf16"), kind=lambda _, lr: torch.optim.SGD(net().parameters(), lr=lr)))


def odd_rank() -> Found:
    return PAIR.run(train_with_an_odd_rank)[0]


def train_with_an_odd_rank(rank: int) -> Found:
    """Train under DDP; rank 1 changes its weights by itself."""
    from torch.nn.parallel import DistributedDataParallel

    loop = Loop(policy_of("bf16"))
    wrapped = DistributedDataParallel(loop.model)
    loop.loss_of = lambda _, batch: loss_of(wrapped, batch)
    loop.train(6)
    if rank == 1:
        with torch.no_grad():
            loop.model[0].weight.add_(1e-3)
    loop.train(4)
    return loop.findings


def _refused(build: Callable[[], object]) -> Found:
    try:
        build()
    except GuardError:
        return [("refused", "stop")]
    return []


_ROWS: tuple[tuple[str, str, str, Callable[[], Found]], ...] = (
    ("inputs grow a million times at step 40; fp16, dynamic scale", "non_finite_loss", "promote", overflow_at_40),
    ("inputs grow a million times; fp16 without loss scaling", "non_finite_loss", "promote", overflow_without_scaling),
    ("the loss is infinite whatever site is in FP32, until all are", "non_finite_loss", "fallback",
     site_that_only_the_fallback_mends),
    ("gradients shrink by a fifth each step under a static scale", "flush", "promote", underflow_growing),
    ("a static scale that leaves gradients no room", "overflow", "promote", near_the_end),
    ("one batch has a NaN", "non_finite_loss", "warn", nan_batch),
    ("every batch is NaN from step 9 on", "non_finite_loss", "stop", only_nan_batches),
    ("an infinite loss whose gradients are finite", "non_finite_loss", "warn", infinite_loss_with_finite_gradients),
    ("a finite loss whose gradients are infinite; bf16", "non_finite_gradient", "fallback",
     infinite_gradient_of_a_finite_loss),
    ("gradients are infinite at any loss scale", "loss_scale_collapse", "fallback", scale_collapse),
    ("a static loss scale that overflows in every step", "loss_scale_collapse", "promote", static_scale_too_large),
    ("every fourth step overflows", "skipped_steps", "fallback", one_step_in_four_skipped),
    ("a checkpoint is resumed without the loss scale", "checkpoint", "warn", scaler_not_restored),
    ("norm gains in bf16 with updates below half an ulp", "frozen_weights", "promote", frozen_gains),
    ("code beside the guard writes NaN into a bias", "non_finite_weights", "restore", weights_broken_beside),
    ("Adam with eps 0 divides 0 by 0", "non_finite_update", "stop", update_of_nothing_over_nothing),
    ("a step carries a weight stored in fp16 beyond its end", "non_finite_update", "promote", beyond_the_end_of_fp16),
    ("the learning rate jumps two hundredfold at step 60", "loss_drift", "restore", divergence),
    ("code beside the guard breaks a weight before each step", "non_finite_weights", "stop", broken_again_and_again),
    ("a checkpoint of another policy is resumed", "refused", "stop", other_policy),
    ("the calibration in the policy was edited", "refused", "stop", unreadable_calibration),
    ("the optimizer is that of another model", "refused", "stop", other_model),
    ("rank 1 edits its weights", "ranks", "restore", odd_rank),
)  # fmt: skip
ORDER = ("warn", "promote", "fallback", "restore", "stop")


def caught(fault: Fault, found: Found) -> str:
    """Return the gravest reaction of the detector meant to catch the fault; empty if it was silent."""
    own = [reaction for detector, reaction in found if detector == fault.detector]
    return max(own, key=ORDER.index, default="")


FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=plant.__name__.replace("_", "-"), planted=planted, detector=detector, reaction=reaction, plant=plant)
    for planted, detector, reaction, plant in _ROWS
)
