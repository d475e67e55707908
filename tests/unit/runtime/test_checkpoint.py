"""Checkpoints: a resumed run equals the uninterrupted one bit for bit, whatever is loaded first."""

import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.policy import LossScale, Policy
from autoprec.runtime import Precision, apply
from tests.unit.runtime.storing import MASTER, STOCHASTIC, net, same, storing, train, weights

SCALE = LossScale(kind="dynamic", initial=2.0**14, growth_interval=3)
POLICIES = {
    "fp32": storing(),
    "plain": storing(storage="bf16"),
    "master": storing(**MASTER),
    "master, low gradients": storing(**MASTER, gradients="storage"),
    "master fp16, scaled": storing(SCALE, storage="fp16", master="fp32", keep=["1.*"]),
    "stochastic": storing(**STOCHASTIC),
}
OPTIMIZERS: dict[str, Any] = {
    "single": lambda params: torch.optim.AdamW(params, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


class Run:
    """Model, policy and optimizer of one training job."""

    def __init__(self, policy: Policy, make: Any) -> None:
        self.model: nn.Module = net()
        self.precision: Precision = apply(self.model, policy)
        self.optimizer: torch.optim.Optimizer = self.precision.optimizer(make(self.model.parameters()))

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "precision": self.precision}

    def saved(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, buffer)
        buffer.seek(0)
        state: dict[str, Any] = torch.load(buffer, weights_only=True)
        return state

    def everything(self) -> list[torch.Tensor]:
        return [*weights(self.model), *self.precision.state_dict()["masters"].values()]


@pytest.mark.parametrize(
    "order", [",".join(names) for names in itertools.permutations(["model", "optimizer", "precision"])]
)
@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_loading(name: str, order: str) -> None:
    check(POLICIES[name], OPTIMIZERS["foreach"], order.split(","))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_optimizer(name: str, make: str) -> None:
    check(POLICIES[name], OPTIMIZERS[make], ["model", "optimizer", "precision"])


def check(policy: Policy, make: Any, order: list[str], first: int = 4, then: int = 4) -> None:
    whole = Run(policy, make)
    losses = train(whole.model, whole.optimizer, whole.precision, range(first))
    interrupted = Run(policy, make)
    assert train(interrupted.model, interrupted.optimizer, interrupted.precision, range(first)) == losses
    state = interrupted.saved()

    resumed = Run(policy, make)
    train(resumed.model, resumed.optimizer, resumed.precision, (99,))  # what is loaded must replace all of it
    for part in order:
        resumed.parts()[part].load_state_dict(state[part])
    steps = range(first, first + then)
    expected = train(whole.model, whole.optimizer, whole.precision, steps)
    assert train(resumed.model, resumed.optimizer, resumed.precision, steps) == expected
    assert same(resumed.everything(), whole.everything())
    assert resumed.precision.scaler.state_dict() == whole.precision.scaler.state_dict()


def test_without_the_masters_a_resumed_run_differs() -> None:
    policy, make = POLICIES["master"], OPTIMIZERS["foreach"]
    whole, resumed = Run(policy, make), Run(policy, make)
    train(whole.model, whole.optimizer, whole.precision, range(4))
    for part in ("model", "optimizer"):
        resumed.parts()[part].load_state_dict(whole.saved()[part])
    for run in (whole, resumed):
        train(run.model, run.optimizer, run.precision, range(4, 8))
    assert not same(resumed.everything(), whole.everything())


def test_the_precision_alone_restores_stored_parameters() -> None:
    policy, make = POLICIES["master"], OPTIMIZERS["sgd"]
    one, two = Run(policy, make), Run(policy, make)
    train(one.model, one.optimizer, one.precision, range(2))
    two.precision.load_state_dict(one.precision.state_dict())
    assert same(one.everything(), two.everything())
    train(two.model, two.optimizer, two.precision, range(1))
    assert not same(one.everything(), two.everything())  # what was loaded was copied


def test_moments_of_a_checkpoint_keep_their_bits_under_stochastic_rounding() -> None:
    one, two = (Run(POLICIES["stochastic"], OPTIMIZERS["foreach"]) for _ in range(2))
    train(one.model, one.optimizer, one.precision, range(2))
    two.optimizer.load_state_dict(one.optimizer.state_dict())
    ours, theirs = (run.optimizer.state[next(run.model.parameters())]["exp_avg"] for run in (one, two))
    assert same([ours], [theirs])
    assert not torch.equal(ours, ours.bfloat16().float())


def test_a_frozen_parameter_stepped_on_later_is_restored() -> None:
    def run() -> Run:
        made = Run(POLICIES["master"], OPTIMIZERS["sgd"])
        made.precision.remove()
        made.model[0].requires_grad_(False)  # type: ignore[index]
        made.precision = apply(made.model, POLICIES["master"])
        made.model[0].requires_grad_(True)  # type: ignore[index]
        return made

    one, two = run(), run()
    train(one.model, one.optimizer, one.precision, range(2))
    state = one.precision.state_dict()
    assert "0.weight" in state["masters"]
    two.precision.load_state_dict(state)
    assert same(one.everything(), two.everything())


def test_states_of_others_are_refused_and_change_nothing() -> None:
    run, other = Run(POLICIES["master"], OPTIMIZERS["sgd"]), Run(POLICIES["stochastic"], OPTIMIZERS["sgd"])
    train(run.model, run.optimizer, run.precision, range(2))
    before = run.everything()
    state = run.precision.state_dict()
    shorter = {**state["masters"]}
    shorter.pop("3.bias")
    wrong = {**state["masters"], "3.bias": torch.zeros(5)}
    more = {**state["masters"], "5.bias": torch.zeros(5)}
    for broken, message in [
        (other.precision.state_dict(), r'under policy "stored" \([0-9a-f]{16}\) and this model runs "stored"'),
        ({}, "not what Precision.state_dict"),
        ({**state, "schema": 2}, "has schema 2 and this autoprec reads 1"),
        ({key: value for key, value in state.items() if key != "scaler"}, "lacks scaler"),
        ({**state, "masters": shorter}, 'no master of "3.bias"'),
        ({**state, "masters": more}, 'a master of "5.bias", which has none here'),
        ({**state, "masters": wrong}, r'master of "3.bias" is torch.float32 of shape \(5,\).*of \(4,\) here'),
    ]:
        with pytest.raises(ApplyError, match=message):
            run.precision.load_state_dict(broken)
    assert same(run.everything(), before)
