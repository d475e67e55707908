"""Optimizers in fused kernels: which can, what they compute, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import ApplyError, PolicyError
from autoprec.policy import LossScale, Parameters, Policy, Rule
from autoprec.runtime import apply
from autoprec.runtime.checkpoint import policy_hash
from autoprec.runtime.fused import fused_fault
from tests.unit.runtime.storing import net, train

KINDS = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
]
RULES = (Rule(sites="*", format="fp32"),)


def policy(**settings: Any) -> Policy:
    return Policy(name="p", rules=RULES, optimizer="fused", **settings)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_fused_optimizer_computes_what_torchs_own_does(kind: Any, options: dict[str, Any]) -> None:
    models = [net(), net()]
    precisions = [apply(models[0], policy()), apply(models[1], Policy(name="plain", rules=RULES))]
    given = kind(models[0].parameters(), lr=0.01, **options)
    fused = precisions[0].optimizer(given)
    assert fused is given
    assert all(group["fused"] for group in fused.param_groups)
    theirs = kind(models[1].parameters(), lr=0.01, fused=True, **options)
    assert precisions[1].optimizer(theirs) is theirs
    losses = [
        train(model, optimizer, precision, range(4))
        for model, optimizer, precision in zip(models, (fused, theirs), precisions, strict=True)
    ]
    assert losses[0] == losses[1]
    loop = net()
    plain = train(loop, kind(loop.parameters(), lr=0.01, **options), apply(loop, "fp32"), range(4))
    assert losses[0] == pytest.approx(plain, rel=1e-5), "four steps, whose sums round in another order"


def test_groups_that_are_added_later_are_fused_too() -> None:
    model = net()
    optimizer = apply(model, policy()).optimizer(torch.optim.AdamW(model[0].parameters(), foreach=True))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(True, None)] * 2


def test_it_unscales_and_skips_by_itself() -> None:
    model = net()
    precision = apply(model, policy(loss_scale=LossScale(kind="dynamic", initial=1024.0)))
    optimizer = precision.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    precision.backward(model(torch.full((4, 8), torch.inf)).sum())
    before = copy.deepcopy(model.state_dict())
    outcome = precision.step(optimizer)
    assert not outcome.is_known
    assert not outcome.stepped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert precision.scaler.get_scale() == 512.0


def test_parameters_stored_low_are_stepped_on_in_fp32() -> None:
    model = net()
    precision = apply(model, policy(parameters=Parameters(storage="bf16", master="fp32")))
    optimizer = precision.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = train(model, optimizer, precision, range(3))
    twin = net()
    other = apply(twin, Policy(name="q", rules=RULES, parameters=Parameters(storage="bf16", master="fp32")))
    assert losses == train(twin, torch.optim.AdamW(twin.parameters(), lr=0.01, fused=True), other, range(3))


def test_a_loop_is_not_stepped_where_the_policy_promises_fused_kernels() -> None:
    model = net()
    precision = apply(model, policy())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(ApplyError, match=r'policy "p" has optimizer: fused, and this AdamW is not; write optimizer = '):
        precision.step(optimizer)
    precision.step(precision.optimizer(optimizer))
    precision.step(torch.optim.RMSprop(model.parameters()))


def test_a_checkpoint_of_a_loop_goes_on_in_fused_kernels() -> None:
    model = net()
    precision = apply(model, policy())
    optimizer = precision.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loop = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, loop, precision, range(2))
    optimizer.load_state_dict(loop.state_dict())
    assert not optimizer.param_groups[0]["fused"], "torch takes the options of the checkpoint"
    precision.optimizer(optimizer)
    train(model, optimizer, precision, range(2, 3))
    assert optimizer.state[model[0].weight]["step"].item() == 3


class OwnAdam(torch.optim.Adam):
    """May compute anything."""


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: torch.optim.RMSprop([nn.Parameter(torch.ones(2))]), "RMSprop has none in torch; those that have are"),
        (lambda: OwnAdam([nn.Parameter(torch.ones(2))]), "OwnAdam has none in torch"),
        (
            lambda: torch.optim.Adam([nn.Parameter(torch.ones(2))], differentiable=True),
            "differentiable=True is not possible in them",
        ),
        (
            lambda: torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
            "torch has no fused Adam for torch.complex64 on cpu",
        ),
    ],
)
def test_what_has_no_fused_kernels_is_refused(make: Any, fault: str) -> None:
    with pytest.raises(ApplyError, match=f'policy "p" has optimizer: fused, and {fault}.*write optimizer: as_given'):
        apply(net(), policy()).optimizer(make())


def test_every_torch_optimizer_that_has_them_is_known() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for name in ("Adagrad", "Adam", "AdamW", "SGD"):
        assert fused_fault(getattr(torch.optim, name)([parameter])) is None


def test_low_state_has_no_fused_kernels() -> None:
    with pytest.raises(PolicyError, match=r"optimizer is 'fused' and parameters.optimizer_state '8bit'"):
        policy(parameters=Parameters(optimizer_state="8bit"))


def test_the_hash_tells_fused_from_as_given() -> None:
    assert policy_hash(policy()) != policy_hash(Policy(name="p", rules=RULES))
