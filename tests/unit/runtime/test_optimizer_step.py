"""Optimizers step on FP32 numbers of low parameters, and everything around a step sees the model's own."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.policy import LossScale, Rule
from autoprec.runtime import apply
from autoprec.runtime.optimizer_step import deactivate_if_unused
from autoprec.runtime.stored import STORED
from tests.unit.runtime.storing import MASTER, STOCHASTIC, batch, net, same, storing, train, weights

OPTIMIZERS: dict[str, Any] = {
    "adamw single": lambda params: torch.optim.AdamW(params, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params),
    "nadam": lambda params: torch.optim.NAdam(params),
}


def by_hand(make: Any, num_steps: int, low: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return stored weights and masters of training with a separate FP32 copy, as one would write it out."""
    model, masters = net(), [nn.Parameter(p.detach().clone()) for p in net().parameters()]
    for p in model.parameters():
        p.data = p.data.to(low)
        p.grad_dtype = torch.float32
    apply(model, storing())  # which casts nothing
    optimizer = make(masters)
    for step in range(num_steps):
        wide = {name: p.float() for name, p in model.named_parameters()}
        torch.func.functional_call(model, wide, (batch(step),)).square().mean().backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad, p.grad = p.grad, None
        optimizer.step()
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data.copy_(master)
    return weights(model), [master.detach() for master in masters]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("storage", ["bf16", "fp16"])
def test_it_equals_master_weights_written_out(name: str, storage: str) -> None:
    model = net()
    precision = apply(model, storing(storage=storage, master="fp32"))
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, precision, range(4))
    stored, masters = by_hand(OPTIMIZERS[name], 4, torch.bfloat16 if storage == "bf16" else torch.float16)
    assert same(weights(model), stored)
    assert same(list(precision.state_dict()["masters"].values()), masters)
    assert set(optimizer.state) == set(model.parameters())
    moments = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    assert {value.dtype for value in moments} == {torch.float32}


@pytest.mark.parametrize("settings", [MASTER, STOCHASTIC])
def test_a_step_below_half_an_ulp_is_not_lost(settings: dict[str, str]) -> None:
    """512 steps of 2^-12 on weights of 1, whose ulp is 2^-7: the sum is 1/8; bf16 alone stays at 1.

    Stochastic rounding moves each weight by 2^-7 with probability 1/32 a step: over 512 steps and 1024 weights the mean
    has a standard error of 2^-7 sqrt(512 / 32 / 1024), below 1e-3.
    """
    model = nn.Linear(32, 32, bias=False)
    nn.init.ones_(model.weight)
    precision = apply(model, storing(**settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    for _ in range(512):
        optimizer.zero_grad()
        (-model.weight.float().sum()).backward()
        optimizer.step()
    mean = model.weight.float().mean().item()
    assert mean == 1.125 if settings is MASTER else abs(mean - 1.125) < 5e-3
    if settings is STOCHASTIC:
        assert model.weight.unique().numel() > 4
    precision.remove()


def test_plain_low_storage_loses_such_steps() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    apply(model, storing(storage="bf16"))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    for _ in range(64):
        optimizer.zero_grad()
        (-model.weight.float().sum()).backward()
        optimizer.step()
    assert torch.equal(model.weight.detach().float(), torch.ones(4, 4))


def test_stochastic_rounding_leaves_torchs_random_numbers_alone() -> None:
    model = net()
    precision = apply(model, storing(**STOCHASTIC))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    train(model, optimizer, precision, range(2))
    assert torch.equal(torch.rand(3), expected)


def test_replicas_round_alike() -> None:
    trained = []
    for _ in range(2):
        model = net()
        train(model, torch.optim.AdamW(model.parameters()), apply(model, storing(**STOCHASTIC)), range(3))
        trained.append(weights(model))
    assert same(*trained)


def test_groups_clipping_and_schedulers_see_the_models_own_parameters() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert norm <= 1.001e-3
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
        optimizer.zero_grad()
        assert all(p.grad is None for p in [*model[0].parameters(), *model[3].parameters()])
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.025]
    optimizer.add_param_group({"params": model[1].parameters()})
    train(model, optimizer, precision, range(1))


def test_hooks_of_others_see_the_weights_before_and_after_the_step() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: dict[str, torch.Tensor] = {}
    optimizer.register_step_post_hook(lambda *_: seen.update(after=model[0].weight.detach().clone()))
    train(model, optimizer, precision, range(1))

    def before(*_: Any) -> None:
        seen["before"] = model[0].weight.detach().clone()
        model[0].weight.grad = torch.zeros(16, 8)

    optimizer.register_step_pre_hook(before)
    assert torch.equal(seen["after"], model[0].weight.detach())
    was = model[0].weight.detach().clone()
    train(model, optimizer, precision, range(1))
    assert torch.equal(seen["before"], was)
    assert torch.equal(seen["after"], was)  # the pre-hook took the gradient away


def test_hooks_on_gradients_outlive_steps() -> None:
    """DistributedDataParallel averages gradients in such hooks; swapping `parameter.data` drops them."""
    model = net()
    precision = apply(model, storing(**MASTER))
    calls: list[int] = []
    accumulator = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: calls.append(1))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, range(3))
    assert len(calls) == 3


def test_closures_are_evaluated_where_the_step_is() -> None:
    """L-BFGS with a line search on a quadratic: it converges only if the model follows inside of the step."""
    model = nn.Linear(4, 1, bias=False)
    apply(model, storing(**MASTER))
    target = torch.tensor([[0.5, -0.25, 1.0, 2.0]])  # numbers that bf16 has
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=20)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model.weight.float() - target).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert closure().item() < 1e-6
    assert optimizer._params[0] is model.weight
    assert set(optimizer.state) == {model.weight}


@pytest.mark.parametrize("settings", [MASTER, STOCHASTIC])
def test_a_closure_of_a_first_order_optimizer(settings: dict[str, str]) -> None:
    def trained(*, by_closure: bool) -> list[torch.Tensor]:
        model = net()
        precision = apply(model, storing(**settings))
        optimizer = torch.optim.AdamW(model.parameters())
        if by_closure:
            for step in range(3):

                def closure(step: int = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(batch(step)).square().mean()
                    loss.backward()
                    return loss

                assert optimizer.step(closure).requires_grad
        else:
            train(model, optimizer, precision, range(3))
        return weights(model)

    if settings is MASTER:
        assert same(trained(by_closure=True), trained(by_closure=False))
    else:  # the closure publishes, which rounds numbers that bf16 has; random numbers are drawn for them all the same
        assert {w.dtype for w in trained(by_closure=True)} == {torch.bfloat16}


class Faulty(torch.optim.SGD):
    """Steps, then raises, the first time."""

    raised = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first, *_ = self.param_groups[0]["params"]
        self.seen = first.dtype
        if closure is not None:
            closure()
        first.add_(0.125)
        if not self.raised:
            type(self).raised = True
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_an_exception_in_a_step_leaves_low_weights_and_the_next_step_goes_on() -> None:
    Faulty.raised = False
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = Faulty(model.parameters(), lr=0.0)
    before = net()[0].weight.detach()
    model(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert torch.equal(model[0].weight.detach(), before.bfloat16())
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    train(model, optimizer, precision, range(1))
    assert torch.equal(precision.state_dict()["masters"]["0.weight"], before + 0.125 + 0.125)
    assert optimizer.seen == torch.float32


def test_a_step_that_fails_after_its_closure_goes_on_too() -> None:
    Faulty.raised = False
    model = net()
    precision = apply(model, storing(**MASTER))
    before = net()[0].weight.detach()
    with pytest.raises(RuntimeError, match="out of memory"):
        Faulty(model.parameters(), lr=0.0).step(lambda: None)
    assert torch.equal(model[0].weight.detach(), before.bfloat16())
    assert torch.equal(precision.state_dict()["masters"]["0.weight"], before + 0.125)
    assert torch.equal(model[0].weight.detach(), (before + 0.125).bfloat16())


def test_an_edit_after_a_failed_step_counts() -> None:
    Faulty.raised = False
    model = net()
    precision = apply(model, storing(**MASTER))
    with pytest.raises(RuntimeError, match="out of memory"):
        Faulty(model.parameters(), lr=0.0).step()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    assert torch.equal(precision.state_dict()["masters"]["0.weight"], torch.full((16, 8), 2.0))


def test_a_subclass_that_steps_through_its_base_publishes_once() -> None:
    Faulty.raised = True
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # the base's own step is hooked from here on
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = Faulty(model.parameters(), lr=0.5)
    versions = model[0].weight._version
    train(model, optimizer, precision, range(1))
    assert model[0].weight._version == versions + 1
    assert model[0].weight.grad is not None
    expected = net()[0].weight.detach() + 0.125 - 0.5 * model[0].weight.grad
    assert torch.equal(precision.state_dict()["masters"]["0.weight"], expected)


def test_one_optimizer_for_two_models_and_two_for_one() -> None:
    one, two = net(0), net(1)
    first, second = apply(one, storing(**MASTER)), apply(two, storing(**STOCHASTIC))
    both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1e-4)
    (one(batch(0)).sum() + two(batch(0)).sum()).backward()
    both.step()
    assert {p.dtype for p in [*one.parameters(), *two.parameters()]} == {torch.bfloat16}
    assert "0.weight" in first.state_dict()["masters"]
    assert not second.state_dict()["masters"]
    halves = [torch.optim.SGD(part.parameters(), lr=1e-4) for part in (one[0], one[3])]
    before = first.state_dict()["masters"]["0.weight"].clone()
    for optimizer in halves:
        optimizer.step()
    after = first.state_dict()["masters"]["0.weight"]
    assert one[0].weight.grad is not None
    assert torch.equal(after, before - 1e-4 * one[0].weight.grad)


def test_attributes_of_parameters_are_there_in_the_step() -> None:
    model = net()
    apply(model, storing(**MASTER))
    model[0].weight.no_decay = True
    model[0].weight.requires_grad_(False)
    found = []

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            first = self.param_groups[0]["params"][0]
            found.append((first.no_decay, first.requires_grad))
            self.param_groups[0]["asked"] = self.asked = True

    optimizer = Asking(model.parameters(), lr=0.1)
    optimizer.step()
    assert found == [(True, False)]
    assert optimizer.asked
    assert optimizer.param_groups[0]["asked"]


def test_fp32_copies_of_a_step_are_gone_after_it_without_the_garbage_collector() -> None:
    model = net()
    precision = apply(model, storing(**STOCHASTIC))
    copies: list[Any] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            copies.extend(weakref.ref(p) for p in self.param_groups[0]["params"])
            return super().step(closure)

    optimizer = Watched(model.parameters(), lr=0.1, momentum=0.9)
    gc.disable()
    try:
        train(model, optimizer, precision, range(2))
        assert len(copies) == 12
        assert all(copy() is None for copy in copies)
    finally:
        gc.enable()


def test_a_skipped_step_of_a_fused_optimizer_changes_nothing() -> None:
    model = net()
    precision = apply(model, storing(LossScale(kind="dynamic", initial=2.0**20), storage="fp16", master="fp32"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = weights(model)
    precision.scaler.scale(model(batch(0)).sum() * 1e38).backward()
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.isfinite().all()
    precision.scaler.step(optimizer)
    precision.scaler.update()
    assert same(weights(model), before)
    assert precision.scaler.get_scale() == 2.0**19


def test_unscaled_gradients_of_fp16_weights_are_fp32() -> None:
    """A scaled gradient of 2^-30 * 2^16 is in the range of fp16; unscaled there it would be zero."""
    model = nn.Linear(1, 1, bias=False)
    precision = apply(model, storing(LossScale(kind="dynamic", initial=2.0**16), storage="fp16", master="fp32"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision.scaler.scale((model.weight.float() * 2.0**-30).sum()).backward()
    precision.scaler.unscale_(optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2.0**-30


def test_sparse_gradients() -> None:
    model = nn.Embedding(6, 3, sparse=True)
    rules = (Rule(sites="*", format="as_given"),)  # torch casts no sparse gradient, so the weight is not cast either
    precision = apply(model, dataclasses.replace(storing(**MASTER), rules=rules))
    before = precision.state_dict()["masters"]["weight"].clone()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.5)
    model(torch.tensor([1, 4, 1])).sum().backward()
    assert model.weight.grad is not None
    assert (model.weight.grad.dtype, model.weight.grad.is_sparse) == (torch.float32, True)
    optimizer.step()
    moved = (precision.state_dict()["masters"]["weight"] != before).all(1)
    assert moved.tolist() == [False, True, False, False, True, False]


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
def test_a_compiled_step_keeps_masters() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    precision = apply(model, storing(**MASTER))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(32):
        optimizer.zero_grad()
        (-model.weight.float().sum()).backward()
        step()
    assert precision.state_dict()["masters"]["weight"].unique().tolist() == [1 + 2.0**-7]
    assert model.weight.unique().tolist() == [1 + 2.0**-7]


def test_hooks_are_taken_out_with_the_last_policy() -> None:
    from torch.optim import optimizer as module

    gc.collect()  # models of other tests
    deactivate_if_unused()
    hooks, load = len(module._global_optimizer_pre_hooks), torch.optim.Optimizer.load_state_dict
    first, second = apply(net(), storing(**MASTER)), apply(net(), storing(**STOCHASTIC))
    assert len(module._global_optimizer_pre_hooks) == hooks + 1
    first.remove()
    assert torch.optim.Optimizer.load_state_dict is not load
    second.remove()
    assert len(STORED) == 0
    assert len(module._global_optimizer_pre_hooks) == hooks
    assert torch.optim.Optimizer.load_state_dict is load


def test_gradients_that_a_step_drops_or_replaces() -> None:
    model = net()
    apply(model, storing(**MASTER))

    class Dropping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            first, second, *_ = self.param_groups[0]["params"]
            first.grad, second.grad = None, torch.full_like(second, 2.0)

    model(batch(0)).sum().backward()
    Dropping(model.parameters(), lr=0.1).step()
    assert model[0].weight.grad is None
    assert torch.equal(model[0].bias.grad, torch.full((16,), 2.0))
