"""The bounded scaler against torch's own."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from autoprec.policy import LossScale, preset
from autoprec.runtime import apply
from autoprec.runtime.loss_scale import BoundedGradScaler


def scales(loss_scale: LossScale, gradients: list[float]) -> list[float]:
    """Return the scale before each step of a run whose raw gradients are given, and after the last."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = BoundedGradScaler("cpu", loss_scale)
    found = []
    for gradient in gradients:
        found.append(scaler.get_scale())
        scaler.scale(weight.sum() * 0)
        weight.grad = torch.tensor([float(gradient)])
        scaler.step(optimizer)
        scaler.update()
    return [*found, scaler.get_scale()]


INF = float("inf")


def test_dynamic_halves_and_doubles_within_its_bounds() -> None:
    rule = LossScale(kind="dynamic", initial=8.0, growth_interval=2, minimum=4.0, maximum=16.0)
    assert scales(rule, [1, 1, 1, 1, 1, 1]) == [8, 8, 16, 16, 16, 16, 16]
    assert scales(rule, [INF, INF, INF, 1, 1]) == [8, 4, 4, 4, 4, 8]


def test_static_never_moves() -> None:
    rule = LossScale(kind="static", initial=1024.0, growth_interval=1)
    assert scales(rule, [1, INF, 1, INF]) == [1024] * 5


def test_without_bounds_it_is_torchs_scaler() -> None:
    rule = LossScale(kind="dynamic", initial=65536.0, growth_interval=2, minimum=2.0**-100, maximum=2.0**100)
    reference = torch.amp.GradScaler("cpu", growth_interval=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    wanted = []
    gradients = [INF, 1, 1, 1, 1, INF, 1.0]
    for gradient in gradients:
        wanted.append(reference.get_scale())
        reference.scale(weight.sum() * 0)
        weight.grad = torch.tensor([float(gradient)])
        reference.step(optimizer)
        reference.update()
    assert scales(rule, gradients)[:-1] == wanted


def test_none_is_off() -> None:
    scaler = BoundedGradScaler("cpu", LossScale())
    assert not scaler.is_enabled()
    assert scaler.scale(torch.ones(1)).item() == 1
    scaler.update()
    assert scaler.get_scale() == pytest.approx(1.0)


def test_a_checkpoint_of_another_policy_stays_within_the_bounds() -> None:
    wide = BoundedGradScaler("cpu", LossScale(kind="dynamic", initial=2.0**20))
    narrow = BoundedGradScaler("cpu", LossScale(kind="dynamic", initial=8.0, maximum=16.0))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.get_scale() == 16.0
    narrow.scale(torch.ones(1))
    assert narrow.get_scale() == 16.0


def test_a_loop_that_forgets_the_scale_is_told_once() -> None:
    model = torch.nn.Linear(2, 2)
    apply(model, "autocast-fp16")
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, torch.nn.Linear(2, 2)))
    model(torch.ones(1, 2)).sum().backward()
    other.step()  # has none of the gradients
    with pytest.warns(RuntimeWarning, match=r"^SGD.step: the policy scales the loss, and this") as told:
        optimizer.step()
    assert "precision.backward(loss)" in str(told[0].message)
    assert told[0].filename == __file__
    optimizer.step()  # said once: warnings are errors here


def test_a_loop_that_scales_is_told_nothing_even_of_steps_without_a_scale() -> None:
    model = torch.nn.Linear(2, 2)
    precision = apply(model, "autocast-fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.backward(model(torch.ones(1, 2)).sum())
    precision.step(optimizer)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_policy_that_was_removed_expects_no_scale_of_plain_training_or_of_its_successor() -> None:
    model = torch.nn.Linear(2, 2)
    former = apply(model, "autocast-fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    former.remove()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # warnings are errors here
    optimizer.zero_grad()
    precision = apply(model, "autocast-fp16")
    precision.backward(model(torch.ones(1, 2)).sum())
    precision.step(optimizer)


def test_a_scaler_whose_policy_was_exchanged_expects_no_scale() -> None:
    model = torch.nn.Linear(2, 2)
    precision = apply(model, "autocast-fp16")
    scaler, optimizer = precision.scaler, torch.optim.SGD(model.parameters(), lr=0.1)
    precision.exchange(preset("fp32", "cpu"))
    assert precision.scaler is not scaler
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_step_that_only_makes_the_state_of_an_optimizer_needs_no_scale() -> None:
    model = torch.nn.Linear(2, 2)
    apply(model, "autocast-fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert get_optimizer_state_dict(model, optimizer)["state"]  # steps on gradients of 0
    model(torch.ones(1, 2)).sum().backward()
    with pytest.warns(RuntimeWarning, match="this one was not scaled"):
        optimizer.step()
