"""Of optimizers with a proof no update moves a weight further than it says; of others a bad step leaves no trace."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

import autoprec
from autoprec.policy import Parameters, Policy, Rule
from autoprec.runtime.finite import GRADIENT_LIMIT
from autoprec.runtime.guard.finite_updates import ROWS, bound, measured, unproven

# The edges of what counts as finite, of what can be squared, and of FP32 itself; four of them stay within the limit.
EDGES = (0.0, 1e-45, 1e-38, 1e-30, 1e-23, 1e-19, 1e-8, 1.0, 1e9, 1e18, GRADIENT_LIMIT / 4)
numbers = st.one_of(
    st.sampled_from(EDGES).flatmap(lambda edge: st.sampled_from((edge, -edge))),
    st.floats(-GRADIENT_LIMIT / 4, GRADIENT_LIMIT / 4, width=32),
)
rows = st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=1, max_size=12)
KINDS = {
    Adam: ({}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}, {"fused": True}, {"betas": (0.0, 0.9)},
           {"betas": (0.95, 0.95)}, {"eps": 1e-20, "lr": 1e-6}, {"lr": 1.0}),
    AdamW: ({}, {"weight_decay": 0.5}, {"amsgrad": True, "fused": True}, {"betas": (0.9, 0.9999)}),
    NAdam: ({}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"momentum_decay": 0.0}),
    RAdam: ({}, {"weight_decay": 0.1}, {"betas": (0.9, 0.9), "lr": 0.1}),
    Adamax: ({}, {"weight_decay": 0.1, "maximize": True}, {"betas": (0.9, 0.95)}),
    Adagrad: ({}, {"weight_decay": 0.1}, {"lr_decay": 0.5}, {"initial_accumulator_value": 1.0}, {"fused": True}),
    RMSprop: ({}, {"momentum": 0.9}, {"weight_decay": 0.1, "momentum": 0.99}, {"alpha": 0.01}),
    SGD: ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "lr": 0.1},
          {"momentum": 0.99, "dampening": 0.9, "maximize": True}, {"momentum": 0.9, "fused": True}),
}  # fmt: skip
RATE = {"lr": 1e-2}


def test_every_proof_is_tried():
    assert KINDS.keys() == ROWS.keys()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(values=rows, data=st.data())
def test_no_update_goes_further_than_proven(kind, values, data):
    options = data.draw(st.sampled_from(KINDS[kind]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    loop = {} if options.get("fused") else {"foreach": data.draw(st.booleans())}
    weight = nn.Parameter(torch.tensor([0.0, 1.0, -3.0, 1e3], dtype=dtype))
    optimizer = kind([weight], **{**RATE, **options, **loop})
    (group,) = optimizer.param_groups
    assert unproven(optimizer, group) == ""
    memory = 0.0
    for row in values:
        if data.draw(st.booleans()):
            group["lr"] *= 0.5  # a schedule
        proven = bound(optimizer, group, memory)
        memory = proven.memory
        before = weight.detach().double()
        weight.grad = torch.tensor(row, dtype=dtype)
        optimizer.step()
        moved = (weight.detach().double() - before).abs()
        # the new weight is rounded once, and a weight that decays once more: to 2**-8 of itself in bf16
        decay = group["lr"] * options.get("weight_decay", 0.01 if kind is AdamW else 0.0)
        unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-22
        assert bool((moved <= proven.furthest + (decay + unit) * before.abs() + unit * proven.furthest).all())
        remembered = measured(optimizer, group)
        assert remembered is None or float(remembered) <= memory * (1 + 1e-6)


class Wild(torch.optim.Optimizer):
    """Makes an infinite weight of every gradient above 1, and counts its steps in three places."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "taken": 0, "seen": torch.zeros(())})

    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] += 1
            group["seen"].add_(1)
            for each in group["params"]:
                state = self.state[each]
                state.setdefault("history", []).append(each.grad.clone())
                state["sum"] = state.get("sum", torch.zeros_like(each)) + each.grad
                with torch.no_grad():
                    each.sub_(torch.where(each.grad > 1, torch.inf, group["lr"] * each.grad))


UNPROVEN = {
    "eps 0": lambda parameters: Adam(parameters, lr=1e-2, eps=0.0),
    "eps 0, fused": lambda parameters: Adam(parameters, lr=1e-2, eps=0.0, fused=True),
    "centered": lambda parameters: RMSprop(parameters, lr=1e-2, centered=True, momentum=0.9, eps=0.0),
    "beta1 outlives beta2": lambda parameters: Adam(parameters, lr=1e-2, betas=(0.9, 0.5)),
    "momentum above 1": lambda parameters: SGD(parameters, lr=1e3, momentum=1e9),
    "rate beyond FP32": lambda parameters: SGD(parameters, lr=1e30),
    "Adadelta": lambda parameters: Adadelta(parameters, lr=1e30, eps=1e-30),
    "Rprop": lambda parameters: Rprop(parameters, lr=1e30, step_sizes=(1e-6, 1e38)),
    "a class of its own": Wild,
}
RULES = (Rule(sites="*", format="fp32"),)
STORAGE = {
    "fp32": Parameters(),
    "masters": Parameters(storage="bf16", master="fp32"),
    "stochastic": Parameters(storage="bf16", rounding="stochastic"),
    "fp16 masters": Parameters(storage="fp16", master="fp32"),
}


def everything(model, optimizer, precision):
    """Return a copy of all that a step may change."""
    state = [list(optimizer.state[each].items()) for each in model.parameters() if each in optimizer.state]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    held = ([each.detach() for each in model.parameters()], state, groups, precision.state_dict())
    return copy.deepcopy(held)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one is other


@settings(max_examples=80)
@given(
    values=st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=2, max_size=6),
    name=st.sampled_from(sorted(UNPROVEN)),
    storage=st.sampled_from(sorted(STORAGE)),
)
def test_what_is_not_proven_is_undone_bit_for_bit(values, name, storage):
    model = nn.Linear(2, 2, bias=False)
    policy = Policy(name=storage, rules=RULES, parameters=STORAGE[storage])
    with autoprec.apply(model, policy) as precision:
        optimizer = UNPROVEN[name](model.parameters())
        guard = autoprec.guard(model, optimizer, precision, snapshot_every=None, reactions=["warn"])
        for row in values:
            before = everything(model, optimizer, precision)
            model.weight.grad = torch.tensor(row).reshape(2, 2).to(model.weight.grad_dtype or torch.float32)
            if not bool(torch.isfinite(model.weight.grad).all()):
                return  # this low format has no such gradient
            outcome = guard.step(torch.ones(()))
            assert bool(torch.isfinite(model.weight).all())
            assert all(bool(torch.isfinite(each).all()) for each in precision.storage.masters().values())
            if outcome.stepped:
                assert outcome.outcome.undone is None
            else:
                assert same(before, everything(model, optimizer, precision))
                last = outcome.events[-1]
                assert (last.detector, last.reaction, last.site) == ("non_finite_update", "warn", "weight")
                assert last.number is not None
                assert last.number >= 1
