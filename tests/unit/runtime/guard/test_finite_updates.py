"""Settings, states and hooks that a proof must not be taken for granted with."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from autoprec.runtime.guard.finite_updates import measured, unproven
from tests.faults.guarded import Loop, policy_of


def fault(optimizer):
    return unproven(optimizer, optimizer.param_groups[0])


def weights():
    return [nn.Parameter(torch.ones(3))]


def test_a_negative_learning_rate_makes_decaying_weights_grow():
    optimizer = AdamW(weights(), lr=0.9, weight_decay=1.0)
    assert fault(optimizer) == ""
    optimizer.param_groups[0]["lr"] = -0.9  # no constructor takes one, but a schedule may come to it
    assert fault(optimizer) == "lr * weight_decay is -0.9, and beyond 0 to 1 weights may grow with each step"


def not_a_number_after(optimizer, *_):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(torch.nan)


def not_a_number_before(optimizer, *_):
    optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)


@pytest.mark.parametrize(
    ("register", "hook"),
    [("register_step_pre_hook", not_a_number_before), ("register_step_post_hook", not_a_number_after)],
)
def test_steps_with_hooks_of_others_are_watched(register, hook):
    loop = Loop(policy_of("bf16"), kind=SGD, every=1000).train(2)
    handle = getattr(loop.optimizer, register)(hook)
    loop.train(1)
    assert loop.is_finite
    assert loop.findings == [("non_finite_update", "warn")]
    handle.remove()
    assert fault(loop.optimizer) == ""


def test_betas_that_are_changed_in_place_are_noticed():
    betas = (torch.tensor(0.9), torch.tensor(0.999))
    loop = Loop(policy_of("bf16"), kind=lambda given, lr: Adam(given, lr, betas=betas, foreach=False), every=1000)
    loop.train(2)
    betas[0].fill_(torch.nan)
    loop.train(1)
    assert loop.is_finite
    assert loop.findings == [("non_finite_update", "warn")]


def test_the_momentum_of_sparse_gradients_is_measured():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=0.1, momentum=0.5)
    (3 * embedding(torch.tensor([1, 2, 2])).sum()).backward()
    optimizer.step()
    assert optimizer.state[embedding.weight]["momentum_buffer"].is_sparse
    assert float(measured(optimizer, optimizer.param_groups[0])) == 6.0
