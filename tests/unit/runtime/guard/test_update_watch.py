"""Steps whose updates are not proven to be finite: what is watched, why, and what is left of a step that is undone."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, RMSprop

import autoprec
from autoprec.policy import LossScale, Parameters
from autoprec.runtime.guard.tensor_copies import copy_of
from tests.faults.guarded import Loop, batch_at, loss_of, net, policy_of

FP16_MASTERS = Parameters(storage="fp16", master="fp32")


class Doubling(Optimizer):
    """A class that nothing is known of: plain gradient descent, whose steps are infinite when it is told so."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.is_wild = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["count"] = self.state[each].get("count", 0) + 1
                self.state[each].setdefault("mean", torch.zeros_like(each)).lerp_(each.grad, 0.1)
                each.sub_(group["lr"] * each.grad)
                if self.is_wild:
                    each[0] = torch.inf


def watched(loop):
    return [
        event.message for event in loop.events if event.detector == "non_finite_update" and event.reaction == "info"
    ]


def undone(loop):
    return [(event.site, event.reaction) for event in loop.events if event.detector == "non_finite_update"][1:]


def dead(model):
    """Return `model` with an input that nothing reads: its weights have gradients of exactly 0."""
    with torch.no_grad():
        model[3].weight[0, 0] = 0.0
        model[1].weight[0] = model[1].bias[0] = 0.0
    return model


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_proven_run_keeps_no_copies_and_says_nothing(name, monkeypatch):
    monkeypatch.setattr("autoprec.runtime.guard.update_watch.KeptStep", None)  # asking for one would fail
    loop = Loop(policy_of(name)).train(6)
    assert watched(loop) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            functools.partial(Adam, eps=0.0),
            "eps is 0: where every gradient so far is 0, or its square, the update is 0 / 0",
        ),
        (functools.partial(Adam, eps=1e-40), "eps is 1e-40"),
        (functools.partial(AdamW, betas=(0.9, 0.5)), "betas are (0.9, 0.5)"),
        (functools.partial(AdamW, weight_decay=2.0), "weight_decay is 2"),
        (functools.partial(torch.optim.NAdam, momentum_decay=0.0, betas=(0.9995, 0.9999)), "betas are (0.9995"),
        (functools.partial(torch.optim.Adamax, betas=(0.9, 0.8)), "betas are (0.9, 0.8)"),
        (functools.partial(RMSprop, centered=True), "centered=True takes the root of a difference"),
        (functools.partial(RMSprop, alpha=1.0), "alpha is 1"),
        (functools.partial(SGD, momentum=1.0), "momentum is 1"),
        (Doubling, "nothing is proven about the updates of Doubling"),
    ],
)
def test_what_is_watched_is_said_once_with_the_reason(kind, why):
    loop = Loop(policy_of("fp32"), kind=kind).train(3)
    (message,) = watched(loop)
    assert message.startswith("updates are watched of group 0 of ")
    assert why in message
    assert "non_finite_update at" not in str(loop.events)


def test_an_infinite_rate_and_one_that_decays_more_than_all_are_watched_from_there_on():
    loop = Loop(policy_of("fp32")).train(2)
    assert watched(loop) == []
    loop.optimizer.param_groups[0]["weight_decay"], loop.optimizer.param_groups[0]["lr"] = 0.9, 1.5
    loop.train(1)
    assert "lr * weight_decay is 1.35" in watched(loop)[0]
    loop.optimizer.param_groups[0]["lr"] = torch.inf
    outcome = loop.step(batch_at(3))
    assert outcome.outcome.undone is not None
    assert loop.is_finite


def test_a_rate_in_a_tensor_is_read_when_it_changes():
    loop = Loop(policy_of("fp32"), kind=functools.partial(AdamW, foreach=False), lr=torch.tensor(1e-2)).train(2)
    assert watched(loop) == []
    loop.optimizer.param_groups[0]["lr"].fill_(torch.nan)
    assert loop.step(batch_at(2)).outcome.undone is not None
    assert "a hyperparameter is not finite" in watched(loop)[0]


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_by_zero_is_undone_bit_for_bit_and_the_next_good_step_goes_on(foreach):
    loops = [
        Loop(policy_of("fp32"), kind=functools.partial(Adam, eps=0.0, foreach=foreach), every=100, reactions=["warn"])
        for _ in range(2)
    ]
    for loop in loops:
        loop.train(2)
    before = copy.deepcopy(loops[0].optimizer.state_dict()["state"])
    loops[0].optimizer.zero_grad()
    loss = loss_of(loops[0].model, batch_at(2))
    loss.backward()
    for name, state in loops[0].optimizer.state.items():
        if name.shape == (1,):  # a history of nothing and a gradient of nothing
            for each in state.values():
                each.zero_()
            name.grad.zero_()
    kept = copy.deepcopy(loops[0].optimizer.state_dict()["state"])
    outcome = loops[0].guard.step(loss)
    assert not outcome.stepped
    assert outcome.outcome.undone == autoprec.runtime.step.Undone(parameter="3.bias", num_elements=1)
    assert outcome.outcome.found_inf == 0
    assert undone(loops[0]) == [("3.bias", "warn")]
    now = loops[0].optimizer.state_dict()["state"]
    for number, state in now.items():
        for name, value in state.items():
            assert torch.equal(value, kept[number][name])
            value.copy_(before[number][name])
    for loop in loops:
        loop.step(batch_at(3))
    for one, two in zip(loops[0].model.parameters(), loops[1].model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_undone_step_moves_neither_scale_nor_scheduler_and_counts_as_skipped():
    policy = policy_of("fp16", scale=LossScale(kind="dynamic", initial=8.0, minimum=8.0, growth_interval=4))
    loop = Loop(policy, kind=Doubling, every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5)
    loop.train(1, scheduler=scheduler)
    loop.optimizer.is_wild = True
    outcome = loop.step(batch_at(1), scheduler=scheduler)
    loop.optimizer.is_wild = False
    assert not outcome.stepped
    assert not outcome.collapsed
    assert loop.precision.scaler.get_scale() == 8.0
    assert scheduler.last_epoch == 1
    assert all(state["count"] == 1 for state in loop.optimizer.state.values())
    assert loop.guard.state_dict()["window"]["skipped"] == [False, True]
    assert loop.train(1, scheduler=scheduler).outcomes[-1].stepped
    assert scheduler.last_epoch == 2


def test_three_in_a_row_restore_and_then_stop():
    loop = Loop(policy_of("bf16"), kind=Doubling, lr=1e-2).train(4)
    loop.optimizer.is_wild = True
    with pytest.raises(autoprec.GuardError, match="update of finite gradients is not finite, 3 steps in a row"):
        loop.train(12)
    assert [reaction for _, reaction in undone(loop)] == ["warn", "warn", "restore", "warn", "warn", "stop"]
    assert loop.is_finite


@pytest.mark.parametrize("kind", [Adam, SGD])
def test_fp16_beyond_its_end_is_undone_and_the_parameter_promoted(kind):
    model = net()
    loop = Loop(policy_of("fp32", low="*", parameters=FP16_MASTERS), model=model, kind=kind, lr=1e-3, every=2).train(2)
    is_bounded = kind is Adam  # SGD goes as far as its gradients are large
    assert bool(watched(loop)) is not is_bounded
    with torch.no_grad():
        model[3].bias.fill_(65472.0)
    loop.optimizer.param_groups[0]["lr"] = 1000.0
    for step in range(4):
        for each in model.parameters():
            each.grad = torch.zeros_like(each, dtype=each.grad_dtype)
        model[3].bias.grad.fill_(-1.0)
        before = loop.precision.storage.masters()["3.bias"].clone() if step < 3 else None
        outcome = loop.guard.step(torch.ones(()))
        assert outcome.stepped is (step == 3)
        assert bool(torch.isfinite(model[3].bias))
        if step < 2:
            assert torch.equal(before, loop.precision.storage.masters()["3.bias"])
            assert float(model[3].bias.detach()) == 65472.0
    assert undone(loop) == [("3.bias", "warn"), ("3.bias", "warn"), ("3.bias", "promote")]
    assert model[3].bias.dtype == torch.float32
    assert float(model[3].bias.detach()) > 65504
    if is_bounded:
        assert "weights are up to 6.55e+04" in watched(loop)[0]


def test_a_loaded_state_that_no_steps_make_is_watched():
    loop = Loop(policy_of("fp32")).train(2)
    state = copy.deepcopy(loop.optimizer.state_dict())
    state["state"][5]["exp_avg_sq"].zero_()  # the first moment has nothing to divide it: lr * m / eps
    state["state"][5]["exp_avg"].fill_(1e20)
    loop.optimizer.load_state_dict(state)
    loop.step(batch_at(2))
    assert "weights are up to" in watched(loop)[0]
    state["state"][5]["exp_avg"].fill_(torch.nan)
    loop.optimizer.load_state_dict(state)
    loop.guard._told_watched.clear()
    assert not loop.step(batch_at(3)).stepped
    assert "its state is not finite" in watched(loop)[1]


def test_weights_that_others_set_are_looked_at_when_sampled():
    loop = Loop(policy_of("fp32"), every=2).train(2)
    with torch.no_grad():
        loop.model[3].bias.fill_(1e20)
    loop.train(1)
    assert "weights are up to 1e+20" in watched(loop)[0]


def test_a_group_that_is_added_is_looked_at():
    loop = Loop(policy_of("fp32")).train(2)
    extra = nn.Parameter(torch.full((2,), 1e30))
    loop.optimizer.add_param_group({"params": [extra]})
    loop.train(1)
    assert "group 1 of AdamW (weights are up to 1e+30" in watched(loop)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_weights_of_other_formats_are_looked_at(dtype):
    extra = nn.Parameter(torch.tensor([3.0, -4.0], dtype=dtype))
    loop = Loop(policy_of("fp32")).train(1)
    loop.optimizer.add_param_group({"params": [extra, nn.Parameter(torch.zeros(0))]})
    assert watched(loop.train(1)) == []
    assert loop.guard._updates._standings[(id(loop.optimizer), 1)].largest == 5.0  # a bound: the norm


def test_lists_of_tensors_in_the_state_come_back():
    model = nn.Linear(8, 1)
    with autoprec.apply(model, policy_of("fp32", low="*")) as precision:
        optimizer = LBFGS(model.parameters(), lr=1.0, max_iter=1)
        guard = autoprec.guard(model, optimizer, precision, reactions=["warn"])

        def stepped(factor):
            optimizer.zero_grad()
            loss = loss_of(model, batch_at(0))
            loss.backward()
            optimizer.param_groups[0]["lr"] = factor
            optimizer.step = functools.partial(LBFGS.step, optimizer, lambda: loss)
            return guard.step(loss)

        assert stepped(1.0).stepped
        assert stepped(0.1).stepped
        before = copy.deepcopy(optimizer.state_dict()["state"][0])
        assert not stepped(torch.inf).stepped
        after = optimizer.state_dict()["state"][0]
        assert after.keys() == before.keys()
        assert len(after["old_dirs"]) == len(before["old_dirs"])
        assert torch.equal(after["d"], before["d"])
        assert stepped(0.1).stepped


def test_a_class_that_only_looks_like_a_proven_one_is_watched():
    class Mine(AdamW):
        pass

    assert "updates of Mine" in watched(Loop(policy_of("fp32"), kind=Mine).train(1))[0]


@pytest.fixture
def eager():
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps, for a minute
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("eager")
def test_low_state_of_torchao_is_watched_and_comes_back():
    policy = policy_of("bf16", parameters=Parameters(optimizer_state="8bit"))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))  # 4096 elements: the first has its state in 8 bit
    precision = autoprec.apply(model, policy)
    optimizer = precision.optimizer(AdamW(model.parameters(), lr=1e-2))
    guard = autoprec.guard(model, optimizer, precision, reactions=["warn"])
    before = None
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        if step == 2:
            before = {key: {n: copy_of(v) for n, v in row.items()} for key, row in optimizer.state.items()}
            optimizer.param_groups[0]["lr"].fill_(torch.nan)
        outcome = guard.step(loss)
        assert outcome.stepped == (step != 2)
        if before is not None and step == 2:
            optimizer.param_groups[0]["lr"].fill_(1e-2)
            for key, row in optimizer.state.items():
                for name, value in row.items():
                    kept = before[key][name]
                    one, two = (v.dequantize() if type(v) is not torch.Tensor else v for v in (value, kept))
                    assert torch.equal(one, two)
    precision.remove()


def test_what_was_not_finite_before_the_step_is_no_update_of_its():
    loop = Loop(policy_of("fp32"), kind=Doubling, every=100).train(1)
    next(iter(loop.optimizer.state.values()))["mean"][0] = torch.inf
    assert loop.train(1).outcomes[-1].stepped


class Counting(SGD):
    """Gradient descent that counts in its group, and ends in infinity when told so."""

    is_wild = False

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["taken"] = group.get("taken", 0) + 1
        super().step()
        if self.is_wild:
            group["params"][0].fill_(torch.inf)


def test_masters_groups_and_state_of_a_first_step_come_back():
    parameters = Parameters(storage="bf16", master="fp32")
    kind = functools.partial(Counting, momentum=0.9)
    loop = Loop(policy_of("fp32", low="*", parameters=parameters), kind=kind, reactions=["warn"])
    loop.optimizer.param_groups[0]["taken"] = 0
    Counting.is_wild = True
    try:
        assert not loop.step(batch_at(0)).stepped
        assert len(loop.optimizer.state) == 0
        assert loop.optimizer.param_groups[0]["taken"] == 0
        Counting.is_wild = False
        loop.train(2)
        held = {name: each.clone() for name, each in loop.precision.storage.masters().items()}
        Counting.is_wild = True
        assert not loop.step(batch_at(3)).stepped
    finally:
        Counting.is_wild = False
    assert loop.optimizer.param_groups[0]["taken"] == 2
    now = loop.precision.storage.masters()
    assert all(torch.equal(now[name], held[name]) for name in held)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in held.values())  # else they show nothing


def test_other_parameters_in_a_group_are_looked_at_anew():
    loop = Loop(policy_of("bf16"), every=1000).train(2)
    group = loop.optimizer.param_groups[0]
    group["params"] = group["params"][::-1]
    loop.train(2)
    assert loop.is_finite
    assert loop.findings == []


def test_a_policy_that_was_exchanged_beside_the_guard_is_noticed():
    loop = Loop(policy_of("fp32"), lr=3e4, kind=functools.partial(AdamW, weight_decay=0.0), every=1000).train(1)
    assert watched(loop) == []
    loop.precision.exchange(policy_of("fp32", parameters=FP16_MASTERS))
    loop.train(3)
    assert len(watched(loop)) == 1
    assert loop.is_finite


class Wrapper(Optimizer):
    """An optimizer around another one that has no hooks of its own, as Accelerate's is."""

    def __init__(self, params, lr):
        self.inner = AdamW(params, lr=lr)

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        self.inner.step()


def test_a_wrapper_without_hooks_is_watched():
    loop = Loop(policy_of("bf16"), kind=Wrapper, snapshot_every=None).train(1)
    assert "nothing is proven about the updates of Wrapper" in watched(loop)[0]
    loop.optimizer.param_groups[0]["lr"] = torch.inf
    assert loop.step(batch_at(1)).outcome.undone is not None
    assert loop.is_finite
