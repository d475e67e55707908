"""Whatever the gradients are, no update that is not finite reaches the weights, and what is finite is stepped on."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoprec
from autoprec.policy import LossScale, Parameters, Policy, Rule

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
gradients = st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=1, max_size=3)
RULES = (Rule(sites="*", format="bf16"),)
POLICIES = {
    "plain": Policy(name="plain", rules=RULES),
    "scaled": Policy(name="scaled", rules=RULES, loss_scale=LossScale(kind="dynamic", initial=8.0)),
    "masters": Policy(name="masters", rules=RULES, parameters=Parameters(storage="bf16", master="fp32")),
    "stochastic": Policy(name="stochastic", rules=RULES, parameters=Parameters(storage="bf16", rounding="stochastic")),
    "low": Policy(name="low", rules=RULES, parameters=Parameters(storage="bf16")),
}
KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


@settings(max_examples=120)
@given(
    rows=gradients,
    name=st.sampled_from(sorted(POLICIES)),
    kind=st.sampled_from(sorted(KINDS)),
    max_norm=st.sampled_from([None, 1.0]),
)
def test_no_update_that_is_not_finite_reaches_the_weights(rows, name, kind, max_norm):
    model = nn.Linear(2, 2)
    policy = POLICIES[name]
    with autoprec.apply(model, policy) as precision:
        optimizer = KINDS[kind](model.parameters())
        guard = autoprec.guard(model, optimizer, precision, snapshot_every=None, reactions=["warn"])
        for row in rows:
            scale = precision.scaler.get_scale() if policy.loss_scale.kind != "none" else 1.0
            precision.scaler.scale(torch.ones(()))  # as a backward pass would: the scale is made
            for parameter, values in ((model.weight, row[:4]), (model.bias, row[4:])):
                given_row = torch.tensor(values).reshape(parameter.shape) * scale
                parameter.grad = given_row.to(parameter.grad_dtype or torch.float32)
            before = [each.detach().clone() for each in model.parameters()]
            wild = any(not bool(torch.isfinite(each.grad).all()) for each in model.parameters())
            tame = all(abs(value) < 1e15 for value in row)
            outcome = guard.step(torch.ones(()), max_norm=max_norm)
            assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
            assert all(bool(torch.isfinite(each).all()) for each in precision.storage.masters().values())
            if wild:
                assert not outcome.stepped
                assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
            if tame and all(map(math.isfinite, row)):
                assert outcome.stepped
