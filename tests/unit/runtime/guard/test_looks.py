"""What is looked at: gradients of narrow layers, and weights that an update moves."""

import pytest
import torch
from torch import nn

import autoprec
from autoprec.policy import LossScale, Parameters
from autoprec.runtime.guard.looks import (
    Movement,
    broken_layer,
    broken_parameter,
    checksum,
    look_at_gradients,
    narrow_layers,
)
from tests.faults.guarded import batch_at, loss_of, net, policy_of


def applied(policy):
    model = net()
    return model, autoprec.apply(model, policy)


def test_only_layers_in_fp16_are_narrow_and_embeddings_never():
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    with autoprec.apply(model, policy_of("fp16", low="*")) as precision:
        assert [(path, name) for path, name, _ in narrow_layers(precision)] == [("1", "fp16"), ("2", "fp16")]
    with autoprec.apply(model, policy_of("bf16", low="*")) as precision:
        assert list(narrow_layers(precision)) == []
        assert look_at_gradients(precision).flush_frac is None


def test_fractions_are_those_of_the_format_times_the_scale():
    model, precision = applied(policy_of("fp16", low="0:linear", scale=LossScale(kind="dynamic")))
    model[0].weight.grad = torch.zeros(16, 8)
    model[0].weight.grad[:, :4] = 2.0**-14  # the smallest normal number is not flushed
    model[0].weight.grad[:, 4:6] = 2.0**-15
    model[0].bias.grad = torch.full((16,), 20000.0)
    look = look_at_gradients(precision)
    assert look.layers == ("0",)
    assert look.flush == (pytest.approx(0.5 / 2),)  # half of the weight's, none of the bias's
    assert look.overflow == (pytest.approx(1 / 4),)  # beyond 65504 / 4: the bias's gradient, of four tensors
    assert look_at_gradients(precision, scale=2.0).flush == (pytest.approx(0.25 / 2),)


def test_movement_tells_frozen_weights_and_leaves_masters_and_idle_groups_alone():
    model, precision = applied(policy_of("bf16", low="*", parameters=Parameters(storage="bf16")))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_of(model, batch_at(0)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.fill_(1.0)
        model[1].weight.fill_(1.0)
        model[3].weight.fill_(2.0**-8)
    movement = Movement(precision, (optimizer,))
    optimizer.step()
    name, frac = movement.frozen()
    assert (name, frac) == ("1.weight", 1.0)
    optimizer.param_groups[0]["lr"] = 0.0
    assert Movement(precision, (optimizer,)).frozen() == ("", 0.0)
    precision.remove()
    model, precision = applied(policy_of("bf16", low="*", parameters=Parameters(storage="bf16", master="fp32")))
    loss_of(model, batch_at(0)).backward()
    assert Movement(precision, (torch.optim.SGD(model.parameters(), lr=1e-9),)).frozen() == ("", 0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_broken_are_named(value):
    model, precision = applied(policy_of("bf16"))
    loss_of(model, batch_at(0)).backward()
    assert (broken_layer(precision), broken_parameter(model)) == ("", "")
    with torch.no_grad():
        model[0].bias.grad[0] = value
        model[1].bias.grad[0] = value
        model[3].bias[0] = value
    assert (broken_layer(precision), broken_parameter(model)) == ("1", "3.bias")


def test_equal_weights_have_equal_sums():
    one, other = net(), net()
    assert checksum(one) == checksum(other)
    with torch.no_grad():
        other[0].bias[3] += 1e-6
    assert checksum(one) != checksum(other)
