"""`precision.backward` and `precision.step` against plain torch.amp.GradScaler, and the mistakes they refuse."""

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import ScalingError
from autoprec.policy import LossScale, Policy, Rule
from autoprec.runtime import Precision, apply, loss_scale

DYNAMIC = LossScale(kind="dynamic", initial=2.0**16, growth_interval=2, minimum=2.0**-100, maximum=2.0**100)
STATIC = LossScale(kind="static", initial=1024.0)


def rules(loss_scale: LossScale, low: str = "fp16") -> Policy:
    return Policy(
        name="scaled",
        rules=(Rule(sites="*:linear", format=low), Rule(sites="*", format="fp32")),
        loss_scale=loss_scale,
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def applied(loss_scale: LossScale, low: str = "fp16") -> tuple[nn.Module, Precision, torch.optim.Optimizer]:
    model = net()
    precision = apply(model, rules(loss_scale, low))
    return model, precision, torch.optim.AdamW(model.parameters(), lr=0.1)


# Batch 3 overflows at any scale above 1: its loss is near the end of fp16.
BATCHES = [(torch.randn(3, 4, generator=torch.Generator().manual_seed(i)), 1e3 if i == 3 else 1.0) for i in range(8)]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, float]) -> torch.Tensor:
    return model(batch[0]).square().mean() * batch[1]


def by_torch(loss_scale: LossScale, low: str, max_norm: float | None, num_batches: int = 1) -> tuple[Any, ...]:
    """Train with the same casts, but with torch's scaler and the loop of its manual."""
    model = net()
    apply(model, rules(LossScale(), low))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    enabled = loss_scale.kind != "none"
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale.initial, growth_interval=2, enabled=enabled)
    scales, norms = [], []
    for index in range(0, len(BATCHES), num_batches):
        optimizer.zero_grad()
        for batch in BATCHES[index : index + num_batches]:
            scaler.scale(loss_of(model, batch)).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        scales.append(scaler.get_scale())
        before = optimizer.state_dict()["state"][0]["step"].item() if optimizer.state_dict()["state"] else 0
        scaler.step(optimizer)
        scaler.update()
        if optimizer.state and optimizer.state_dict()["state"][0]["step"].item() > before:
            scheduler.step()
    return scales, norms, [p.detach().clone() for p in model.parameters()], scheduler.get_last_lr()


def by_us(loss_scale: LossScale, low: str, max_norm: float | None, num_batches: int = 1) -> tuple[Any, ...]:
    model, precision, optimizer = applied(loss_scale, low)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scales, norms = [], []
    for index in range(0, len(BATCHES), num_batches):
        optimizer.zero_grad()
        for batch in BATCHES[index : index + num_batches]:
            precision.backward(loss_of(model, batch))
        outcome = precision.step(optimizer, max_norm=max_norm, scheduler=scheduler)
        scales.append(outcome.loss_scale)
        if outcome.grad_norm is not None:
            norms.append(float(outcome.grad_norm))
    return scales, norms, [p.detach().clone() for p in model.parameters()], scheduler.get_last_lr()


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("low", ["fp16", "fp32"])
@pytest.mark.parametrize("loss_scale", [DYNAMIC, LossScale()], ids=["dynamic", "none"])
def test_equal_to_torchs_scaler_bit_for_bit(
    loss_scale: LossScale, low: str, max_norm: float | None, num_batches: int
) -> None:
    ours, theirs = (run(loss_scale, low, max_norm, num_batches) for run in (by_us, by_torch))
    if loss_scale.kind == "none":
        theirs = ([1.0] * len(theirs[0]), *theirs[1:])
    assert ours[0] == theirs[0]
    assert str(ours[1]) == str(theirs[1])
    assert ours[3] == theirs[3]
    assert all(torch.equal(a, b) for a, b in zip(ours[2], theirs[2], strict=True))
    if loss_scale.kind == "dynamic" and low == "fp16":
        assert any(later < earlier for earlier, later in zip(ours[0], ours[0][1:], strict=False)), "nothing overflowed"


def test_a_static_scale_skips_what_is_not_finite_and_stays() -> None:
    model, precision, optimizer = applied(STATIC)
    outcomes = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for factor in (1.0, 1e6, 1e6, 1.0):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            precision.backward(loss_of(model, (BATCHES[0][0], factor)))
            outcomes.append(outcome := precision.step(optimizer, max_norm=1.0))
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert moved == outcome.stepped
    assert [outcome.stepped for outcome in outcomes] == [True, False, False, True]
    assert [outcome.collapsed for outcome in outcomes] == [False, True, True, False]
    assert {outcome.loss_scale for outcome in outcomes} == {1024.0}
    assert [each.category for each in told] == [RuntimeWarning]
    assert "loss scale 1024, the smallest" in str(told[0].message)
    assert "precision.find_overflow(batch)" in str(told[0].message)


def test_collapse_is_told_at_the_smallest_scale_and_once() -> None:
    scale = LossScale(kind="dynamic", initial=8.0, minimum=4.0)
    model, precision, optimizer = applied(scale)
    seen = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            precision.backward(loss_of(model, BATCHES[0]) * float("inf"))
            seen.append((precision.step(optimizer).collapsed, len(told)))
    assert seen == [(False, 0), (True, 1), (True, 1)]
    assert told[0].filename == __file__


def test_without_scaling_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, precision, _ = applied(LossScale())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW itself reads its step counter
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loss = loss_of(model, BATCHES[0])
    before = model[0].weight.detach().clone()  # type: ignore[index, operator]

    def waits(*_: Any) -> Any:
        raise AssertionError("a tensor was read")

    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    precision.backward(loss)
    outcome = precision.step(optimizer, max_norm=1.0, scheduler=scheduler)
    monkeypatch.undo()
    assert (outcome.stepped, outcome.loss_scale, outcome.collapsed) == (True, 1.0, False)
    assert isinstance(outcome.grad_norm, torch.Tensor)
    assert not torch.equal(before, model[0].weight)  # type: ignore[index, arg-type]
    assert scheduler.get_last_lr() == [0.1 * 0.9]


def clip_scaled(model: nn.Module, precision: Precision, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_values(model: nn.Module, precision: Precision, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def exchange(model: nn.Module, precision: Precision, optimizer: torch.optim.Optimizer) -> None:
    kept.append(model[0].weight.grad)  # type: ignore[index]
    model[0].weight.grad = model[0].weight.grad / 2  # type: ignore[index, operator]


kept: list[Any] = []


@pytest.mark.parametrize("touch", [clip_scaled, clip_values, exchange])
@pytest.mark.parametrize("manual", [True, False])
def test_scaled_gradients_must_not_be_changed(touch: Callable[..., None], manual: bool) -> None:
    model, precision, optimizer = applied(DYNAMIC)
    if manual:
        precision.scaler.scale(loss_of(model, BATCHES[0])).backward()
    else:
        precision.backward(loss_of(model, BATCHES[0]))
    touch(model, precision, optimizer)
    for refused in (precision.step, precision.scaler.step, precision.scaler.unscale_):
        with pytest.raises(
            ScalingError, match=r"(?s)max_norm / scale; write.*precision.backward\(loss\).*max_norm=1.0"
        ):
            refused(optimizer)
    precision.scaler.accept_gradients()
    assert precision.step(optimizer).stepped


def test_the_manual_order_goes_through_and_equals_ours() -> None:
    results = []
    for manual in (True, False):
        model, precision, optimizer = applied(DYNAMIC)
        for batch in BATCHES[:3]:
            optimizer.zero_grad()
            if manual:
                precision.scaler.scale(loss_of(model, batch)).backward()
                precision.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                precision.scaler.step(optimizer)
                precision.scaler.update()
            else:
                precision.backward(loss_of(model, batch))
                precision.step(optimizer, max_norm=0.1)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_unscaling_by_hand_ahead_of_our_step_is_not_repeated() -> None:
    model, precision, optimizer = applied(DYNAMIC)
    precision.backward(loss_of(model, BATCHES[0]))
    precision.scaler.unscale_(optimizer)
    wanted = model[0].weight.grad.clone()  # type: ignore[index, operator]
    precision.step(optimizer, max_norm=1e9)
    assert torch.equal(model[0].weight.grad, wanted)  # type: ignore[index]


def test_a_backward_pass_that_was_not_scaled_is_refused() -> None:
    model, precision, optimizer = applied(DYNAMIC)
    precision.backward(loss_of(model, BATCHES[0]))
    precision.step(optimizer)
    optimizer.zero_grad()
    loss_of(model, BATCHES[1]).backward()
    with pytest.raises(ScalingError, match=r"(?s)no loss was scaled.*precision.backward\(loss\)"):
        precision.step(optimizer)
    with pytest.raises(ScalingError, match="no loss was scaled"):
        precision.scaler.step(optimizer)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_the_last_step_must_be_gone(to_none: bool) -> None:
    model, precision, optimizer = applied(DYNAMIC)
    for index, batch in enumerate(BATCHES[:3]):
        if index:
            optimizer.zero_grad(set_to_none=to_none)
        for _ in range(2):
            precision.backward(loss_of(model, batch))
        precision.step(optimizer, max_norm=1.0)
    precision.backward(loss_of(model, BATCHES[0]))
    with pytest.raises(ScalingError, match=r"left behind.*optimizer.zero_grad\(\)"):
        precision.step(optimizer)
    optimizer.zero_grad(set_to_none=to_none)
    precision.backward(loss_of(model, BATCHES[0]))
    assert precision.step(optimizer).stepped


def test_two_optimizers_step_together_with_one_update() -> None:
    results = []
    for ours in (True, False):
        model = net()
        precision = apply(model, rules(DYNAMIC))
        one, other = (torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2))  # type: ignore[index]
        for batch in BATCHES:
            for optimizer in (one, other):
                optimizer.zero_grad()
            precision.backward(loss_of(model, batch))
            if ours:
                precision.step(one, other)
            else:
                precision.scaler.step(one)
                precision.scaler.step(other)
                precision.scaler.update()
        results.append([precision.scaler.get_scale(), *[p.detach().clone() for p in model.parameters()]])
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True))


def test_two_optimizers_one_after_the_other_are_refused() -> None:
    model = net()
    precision = apply(model, rules(DYNAMIC))
    one, other = (torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2))  # type: ignore[index]
    precision.backward(loss_of(model, BATCHES[0]))
    precision.step(one)
    with pytest.raises(ScalingError, match=r"step together, precision.step\(one, other\)"):
        precision.step(other)
    for wrong in ((), (one, one)):
        with pytest.raises(ScalingError, match=r"no optimizer was given|give each once"):
            precision.step(*wrong)


def test_a_critic_may_be_left_with_gradients_of_the_generator() -> None:
    model = net()
    precision = apply(model, rules(DYNAMIC))
    generator, critic = (torch.optim.SGD(model[place].parameters(), lr=0.01) for place in (0, 2))  # type: ignore[index]
    for batch in BATCHES[:3]:
        for optimizer in (critic, generator):
            optimizer.zero_grad()
            precision.backward(loss_of(model, batch))
            precision.step(optimizer, max_norm=1.0)


def test_torchs_own_errors_stay() -> None:
    model, precision, optimizer = applied(DYNAMIC)
    precision.backward(loss_of(model, BATCHES[0]))
    precision.scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        precision.scaler.unscale_(optimizer)
    precision.scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        precision.scaler.step(optimizer)


def test_a_fused_optimizer_is_watched_too() -> None:
    model = net()
    precision = apply(model, rules(DYNAMIC))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    precision.backward(loss_of(model, BATCHES[0]))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ScalingError, match="max_norm / scale"):
        precision.step(optimizer)
    optimizer.zero_grad()
    precision.backward(loss_of(model, BATCHES[0]) * float("inf"))
    outcome = precision.step(optimizer)
    assert not outcome.is_known
    assert not outcome.stepped
    optimizer.zero_grad()
    precision.backward(loss_of(model, BATCHES[0]))
    assert precision.step(optimizer, max_norm=1.0).stepped


def test_a_copied_or_pickled_scaler_goes_on_without_the_watch() -> None:
    _, precision, _ = applied(DYNAMIC)
    for twin in (copy.deepcopy(precision.scaler), pickle.loads(pickle.dumps(precision.scaler))):
        assert twin.get_scale() == 2.0**16
        assert twin.state_dict() == precision.scaler.state_dict()


def test_several_losses_scaled_at_once() -> None:
    model, precision, optimizer = applied(DYNAMIC)
    for loss in precision.scaler.scale([loss_of(model, batch) for batch in BATCHES[:2]]):
        loss.backward()
    assert precision.step(optimizer, max_norm=1.0).stepped


def test_arguments_go_to_backward() -> None:
    model, precision, optimizer = applied(DYNAMIC)
    loss = loss_of(model, BATCHES[0])
    precision.backward(loss, retain_graph=True)
    precision.backward(loss)
    assert precision.step(optimizer).stepped


def test_an_optimizer_that_steps_past_the_scaler_is_refused() -> None:
    model, precision, optimizer = applied(LossScale(kind="dynamic", initial=1024.0))
    before = [p.detach().clone() for p in model.parameters()]
    precision.backward(loss_of(model, BATCHES[0]))
    with pytest.raises(ScalingError, match=r"AdamW.step: its gradients are still multiplied by the loss scale"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    precision.scaler.unscale_(optimizer)
    optimizer.step()  # by hand: what a scaler would skip is the caller's to see
    precision.scaler.update()
    optimizer.zero_grad()
    other = nn.Linear(1, 1)
    other(torch.ones(1, 1)).sum().backward()
    precision.backward(loss_of(model, BATCHES[0]))
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_a_scaler_that_is_gone_looks_at_no_step() -> None:
    gc.collect()
    alive = len(loss_scale._watching)
    model, precision, optimizer = applied(LossScale(kind="dynamic", initial=1024.0))
    assert len(loss_scale._watching) == alive + 1
    precision.remove()
    del model, precision, optimizer
    gc.collect()
    assert len(loss_scale._watching) == alive
