"""What a policy means under everything torch code does: each is the model with its casts written out by hand."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import autoprec
from autoprec.errors import ApplyError
from autoprec.policy import Policy, Rule

LOW = torch.bfloat16


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules), **settings)


BF16 = policy(("*", "bf16"))
LINEARS = policy(("*:linear", "bf16"), ("*", "fp32"))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.two(torch.tanh(self.one(x)))
        return y


def by_hand(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`Critic` under LINEARS, with its casts written out."""
    low = {name: value.to(LOW) for name, value in parameters.items()}
    h = torch.tanh(F.linear(x.to(LOW), low["one.weight"], low["one.bias"]).float())
    return F.linear(h.to(LOW), low["two.weight"], low["two.bias"]).float()


@pytest.fixture
def critic() -> Critic:
    torch.manual_seed(0)
    return Critic()


def batch(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}


def mode_stack_is_clean() -> bool:
    return torch._C._len_torch_function_stack() == 0 and (torch.ones(1) @ torch.ones(1)).dtype == torch.float32


# Derivatives


def penalty(scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("in_loss", [True, False])
def test_a_gradient_penalty_is_that_of_casts_by_hand(critic: Critic, *, in_loss: bool) -> None:
    parameters = named(critic)
    precision = autoprec.apply(critic, LINEARS)
    x = batch().requires_grad_()
    if in_loss:
        with precision.loss():
            loss = critic(x).mean() + 10 * penalty(critic(x), x)
            loss.backward()
    else:
        loss = critic(x).mean() + 10 * penalty(critic(x), x)
        loss.backward()
    z = batch().requires_grad_()
    wanted = by_hand(parameters, z).mean() + 10 * penalty(by_hand(parameters, z), z)
    wanted.backward()
    assert torch.equal(loss, wanted)
    for name, parameter in critic.named_parameters():
        assert parameter.grad is not None
        ours, theirs = parameter.grad, parameters[name].grad
        assert theirs is not None
        # Two calls: their weight gradients are added in bf16 where a weight is cast once, in FP32 where cast twice.
        assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max(), name


def test_autograd_grad_is_that_of_casts_by_hand(critic: Critic) -> None:
    parameters = named(critic)
    autoprec.apply(critic, LINEARS)
    ours = torch.autograd.grad(critic(batch()).square().sum(), list(critic.parameters()))
    theirs = torch.autograd.grad(by_hand(parameters, batch()).square().sum(), list(parameters.values()))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


Transform = Callable[[Callable[..., torch.Tensor], dict[str, torch.Tensor], torch.Tensor], Any]


def _grad(f: Callable[..., torch.Tensor], p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return torch.func.grad(lambda p: f(p, x).square().sum())(p)


def _per_sample(f: Callable[..., torch.Tensor], p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(lambda p, row: f(p, row[None]).square().sum()), (None, 0))(p, x)


def _jvp(f: Callable[..., torch.Tensor], p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return torch.func.jvp(lambda x: f(p, x), (x,), (torch.ones_like(x),))


def _jacrev(f: Callable[..., torch.Tensor], p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return torch.func.jacrev(lambda x: f(p, x))(x)


def _jacfwd(f: Callable[..., torch.Tensor], p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return torch.func.jacfwd(lambda x: f(p, x))(x)


def _hessian(f: Callable[..., torch.Tensor], p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return torch.func.hessian(lambda x: f(p, x).sum())(x[:2])


def _vmap_models(f: Callable[..., torch.Tensor], p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    stacked = {name: torch.stack([value, value * 0.5]) for name, value in p.items()}
    return torch.func.vmap(f, (0, None))(stacked, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # forward mode's own
@pytest.mark.parametrize("transform", [_grad, _per_sample, _jvp, _jacrev, _jacfwd, _hessian, _vmap_models])
def test_functional_transforms_are_those_of_casts_by_hand(critic: Critic, transform: Transform) -> None:
    parameters = {name: value.detach() for name, value in named(critic).items()}
    autoprec.apply(critic, LINEARS)

    def applied(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(critic, p, (x,))
        return result

    ours = torch.utils._pytree.tree_leaves(transform(applied, parameters, batch()))
    theirs = torch.utils._pytree.tree_leaves(transform(by_hand, parameters, batch()))
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert mode_stack_is_clean()


def test_a_transform_after_a_plain_call_reuses_no_cast(critic: Critic) -> None:
    autoprec.apply(critic, LINEARS)
    critic(batch())
    scaled = {name: 2 * value.detach() for name, value in critic.named_parameters()}
    doubled = torch.func.functional_call(critic, scaled, (batch(),))
    assert torch.equal(doubled, by_hand(scaled, batch()))
    assert torch.equal(critic(batch()), by_hand(dict(critic.named_parameters()), batch()))


# Control flow


def test_a_module_shared_by_two_parents_has_one_path() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    autoprec.apply(model, policy(("0.0", "bf16"), ("*", "fp32")))
    x = batch()
    low = F.linear(x.to(LOW), shared.weight.to(LOW), shared.bias.to(LOW))
    wanted = F.linear(low, shared.weight.to(LOW), shared.bias.to(LOW)).float()
    assert torch.equal(model(x), wanted)


class Recursive(nn.Module):
    """Calls itself through a child, which holds it in a list so that it is no submodule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.child = nn.Linear(4, 4), Caller()
        self.child.parents = [self]
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.linear(x) * 1.1
        self.dtypes.append(x.dtype)
        if depth:
            x = self.child(x, depth - 1)
        y = x * 1.2  # the second product of this call, whatever ran inside
        self.dtypes.append(y.dtype)
        return y


class Caller(nn.Module):
    parents: list[Any]

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        y: torch.Tensor = self.parents[0](x, depth)
        return y


def test_recursion_counts_each_call_by_itself() -> None:
    model = Recursive()
    autoprec.apply(model, policy((":mul#1", "fp16"), ("*", "bf16")))
    assert model(batch()).dtype == torch.float32
    assert model.dtypes == [LOW] * 3 + [torch.float16] * 3


def test_a_generator_is_cast_where_it_runs() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dtypes = nn.Linear(4, 4), list[torch.dtype]()

        def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for _ in range(2):
                x = self.linear(x) * 1.5
                yield x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = list(self.parts(x))
            self.dtypes = [part.dtype for part in parts]
            return torch.cat(parts)

    model = Parts()
    autoprec.apply(model, policy((":mul#1", "fp32"), ("*", "bf16"), outputs="computed"))
    assert [part.dtype for part in model.parts(batch())] == [LOW, LOW], "outside forward the products are nobody's"
    assert model(batch()).dtype == LOW
    assert model.dtypes == [LOW, torch.float32]
    assert mode_stack_is_clean()


def test_an_abandoned_generator_leaves_the_thread_clean() -> None:
    class Lazy(nn.Module):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield x * 2
            yield x * 3

    model = Lazy()
    autoprec.apply(model, policy(("*", "bf16"), outputs="computed"))
    lazy = iter(model(batch()))
    assert next(lazy).dtype == torch.float32, "it runs when forward has returned"
    del lazy
    assert mode_stack_is_clean()


@pytest.mark.parametrize("where", ["forward", "child", "pre_hook", "hook", "loss"])
def test_an_exception_leaves_everything_clean_and_the_next_call_right(critic: Critic, where: str) -> None:
    armed = [True]

    def fail(*_: Any) -> None:
        if armed[0]:
            raise ValueError("broken")

    {
        "forward": critic.register_forward_pre_hook,
        "child": critic.two.register_forward_pre_hook,
        "pre_hook": critic.one.register_forward_pre_hook,
        "hook": critic.two.register_forward_hook,
        "loss": lambda _: None,
    }[where](fail)
    precision = autoprec.apply(critic, LINEARS)

    def step() -> None:
        with precision.loss():
            critic(batch())
            fail()

    with pytest.raises(ValueError, match="broken"):
        step()
    assert mode_stack_is_clean()
    armed[0] = False
    assert torch.equal(critic(batch()), by_hand(dict(critic.named_parameters()), batch()))


def test_an_exception_inside_backward_leaves_the_thread_clean(critic: Critic) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("broken")

    precision = autoprec.apply(critic, LINEARS)
    handle = critic.one.weight.register_hook(fail)
    with pytest.raises(ValueError, match="broken"), precision.loss():
        critic(batch()).sum().backward()
    handle.remove()
    assert mode_stack_is_clean()
    with precision.loss():
        critic(batch()).sum().backward()
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32


# Threads


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(works)
    start = threading.Barrier(len(works))

    def run(place: int) -> None:
        start.wait()
        try:
            results[place] = works[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_model_in_two_threads(critic: Critic) -> None:
    wanted = by_hand(dict(critic.named_parameters()), batch())
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), critic.one.weight)
    precision = autoprec.apply(critic, LINEARS)

    def work() -> bool:
        for _ in range(30):
            with precision.loss():
                y = critic(batch())
            (gradient,) = torch.autograd.grad(y.sum(), critic.one.weight)
            if not (torch.equal(y, wanted) and torch.equal(gradient, wanted_gradient)):
                return False
        return True

    assert in_threads(work, work) == [True, True]


def test_training_in_one_thread_and_evaluating_in_another(critic: Critic) -> None:
    wanted = by_hand(dict(critic.named_parameters()), batch()).detach()
    autoprec.apply(critic, LINEARS)

    def train() -> bool:
        return all(
            torch.autograd.grad(critic(batch()).sum(), list(critic.parameters()))[0] is not None for _ in range(30)
        )

    def evaluate() -> bool:
        with torch.no_grad():
            return all(torch.equal(critic(batch()), wanted) for _ in range(30))

    assert in_threads(train, evaluate) == [True, True]


def test_remove_in_another_thread_restores_the_model(critic: Critic) -> None:
    wanted = critic(batch())
    precision = autoprec.apply(critic, LINEARS)
    critic(batch())
    assert in_threads(precision.remove) == [None]
    assert torch.equal(critic(batch()), wanted)


# Models in models


def test_a_frozen_applied_model_inside_another_keeps_its_policy() -> None:
    teacher = nn.Linear(4, 4)
    autoprec.apply(teacher, policy(("*", "fp16"), outputs="computed"))

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            taught = teacher(x)  # no submodule
            return taught, self.linear(x), taught * 1.0

    student = Student()
    autoprec.apply(student, policy(("*", "bf16"), outputs="computed"))
    taught, own, product = student(batch())
    assert (taught.dtype, own.dtype, product.dtype) == (torch.float16, LOW, LOW)
    assert mode_stack_is_clean()


def test_a_deep_copy_and_its_original_do_not_disturb_each_other(critic: Critic) -> None:
    autoprec.apply(critic, LINEARS)
    twin = copy.deepcopy(critic)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    for model in (critic, twin, critic):
        assert torch.equal(model(batch()), by_hand(dict(model.named_parameters()), batch()))
    averaged = torch.optim.swa_utils.AveragedModel(critic)
    averaged.update_parameters(critic)
    assert torch.equal(averaged(batch()), critic(batch()))


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "save"])
def test_saving_an_applied_model_says_what_to_do(critic: Critic, save: Callable[[nn.Module], Any]) -> None:
    precision = autoprec.apply(critic, LINEARS)
    with pytest.raises(
        ApplyError, match=r'runs policy "test": a policy is installed, not saved; save model.state_dict'
    ):
        save(critic)
    precision.remove()
    save(critic)


def test_the_state_dict_is_that_of_the_plain_model(critic: Critic) -> None:
    before = {name: value.clone() for name, value in critic.state_dict().items()}
    autoprec.apply(critic, LINEARS)
    critic(batch())
    file = io.BytesIO()
    torch.save(critic.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == list(before)
    assert all(torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype for name, value in before.items())


@pytest.mark.parametrize("assign", [True, False])
def test_loading_a_state_dict_is_seen_by_the_next_call(critic: Critic, *, assign: bool) -> None:
    autoprec.apply(critic, LINEARS)
    critic(batch())
    doubled = {name: 2 * value for name, value in critic.state_dict().items()}
    critic.load_state_dict(doubled, assign=assign)
    assert torch.equal(critic(batch()), by_hand(doubled, batch()))


# Modes of a model


def test_train_and_eval_are_left_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    autoprec.apply(model, policy(("*", "bf16")))
    model(batch())
    moved = model[2].running_mean.clone()
    model.eval()
    assert torch.equal(model(batch()), model(batch()))
    assert torch.equal(model[2].running_mean, moved)
    model.train()
    assert not torch.equal(model(batch()), model(batch()))
    assert not torch.equal(model[2].running_mean, moved)


@pytest.mark.parametrize("order", ["train-first", "evaluate-first"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_and_training_take_turns(critic: Critic, context: Callable[[], Any], order: str) -> None:
    autoprec.apply(critic, LINEARS)
    wanted = by_hand(dict(critic.named_parameters()), batch())
    for turn in range(4):
        if (turn % 2 == 0) == (order == "train-first"):
            critic.zero_grad()
            y = critic(batch())
            y.sum().backward()
            assert all(parameter.grad is not None for parameter in critic.parameters())
        else:
            with context():
                y = critic(batch())
            assert not y.requires_grad
        assert torch.equal(y, wanted)


def test_a_model_built_in_inference_mode_runs() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
        autoprec.apply(model, policy(("*", "bf16"), outputs="computed"))
        for _ in range(2):
            assert model(batch()).dtype == LOW


# Hooks and ways to call


def test_hooks_see_what_the_policy_computes(critic: Critic) -> None:
    seen: list[tuple[str, torch.dtype]] = []
    critic.two.register_forward_pre_hook(lambda module, args: seen.append(("pre", args[0].dtype)))
    critic.two.register_forward_hook(lambda module, args, y: seen.append(("post", y.dtype)))
    critic.two.register_full_backward_pre_hook(lambda module, gradient: seen.append(("back_pre", gradient[0].dtype)))
    critic.one.register_full_backward_hook(lambda module, inputs, outputs: seen.append(("back", outputs[0].dtype)))
    autoprec.apply(critic, LINEARS)
    critic(batch().requires_grad_()).sum().backward()
    assert seen == [("pre", torch.float32), ("post", LOW), ("back_pre", LOW), ("back", LOW)]


def test_what_a_hook_returns_is_used_and_its_ops_are_sites_of_the_caller(critic: Critic) -> None:
    critic.one.register_forward_hook(lambda module, args, y: y * 1.25)
    autoprec.apply(critic, policy((":mul", "fp16"), ("*:linear", "bf16"), ("*", "as_given"), outputs="computed"))
    seen = []
    critic.two.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    critic(batch())
    assert seen == [torch.float16]


def test_keywords_alone_and_other_methods() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(self.down(input=x), dim=-1)

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.up(input=self.encode(x))
            return y

    model = Autoencoder()
    precision = autoprec.apply(model, policy((":softmax", "fp16"), ("@loss:softmax", "fp16"), ("*", "bf16")))
    assert model(x=batch()).dtype == torch.float32
    assert model.encode(batch()).dtype == LOW, "outside forward nobody casts but the modules that are called"
    with precision.loss():
        assert model.encode(batch()).dtype == torch.float16, "the loss block is how other entrances are covered"


# Parametrized and adapted weights


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
@pytest.mark.parametrize("late", [True, False])
def test_parametrized_weights_train(wrap: Callable[[nn.Module], nn.Module], *, late: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if not late:
        wrap(model[0])
    precision = autoprec.apply(model, policy(("0:linear", "bf16"), ("2:linear", "bf16"), ("*", "fp32")))
    if late:
        wrap(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(batch()) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    precision.remove()
    assert (model(batch()) - 1).square().mean().item() < losses[0]


def test_weights_inside_cached_parametrizations_are_what_they_are(critic: Critic) -> None:
    parametrizations.weight_norm(critic.one)
    autoprec.apply(critic, LINEARS)
    with nn.utils.parametrize.cached():
        first, second = critic(batch()), critic(batch())
    assert torch.equal(first, second)
    with torch.no_grad():
        critic.one.parametrizations.weight.original0.mul_(2)
    assert not torch.equal(critic(batch()), first)


def test_pruned_weights_stay_pruned(critic: Critic) -> None:
    prune.random_unstructured(critic.one, "weight", amount=0.5)
    autoprec.apply(critic, LINEARS)
    parameters = {**dict(critic.named_parameters()), "one.weight": critic.one.weight}
    assert torch.equal(critic(batch()), by_hand(parameters, batch()))
    critic(batch()).sum().backward()
    gradient = critic.one.weight_orig.grad
    assert isinstance(gradient, torch.Tensor)
    assert gradient[critic.one.weight_mask == 0].abs().sum() == 0
    prune.random_unstructured(critic.one, "weight", amount=0.5)
    parameters = {**dict(critic.named_parameters()), "one.weight": critic.one.weight_orig * critic.one.weight_mask}
    assert torch.equal(critic(batch()), by_hand(parameters, batch()))


def test_low_rank_adapters_train_beside_a_frozen_weight() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base.requires_grad_(requires_grad=False), nn.Linear(4, 2), nn.Linear(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.base(x) + 2.0 * self.up(self.down(x))
            return y

    model = Adapted(nn.Linear(4, 4))
    autoprec.apply(model, policy(("base", "bf16"), ("*", "fp32")))
    model(batch()).sum().backward()
    assert model.base.weight.grad is None
    assert model.up.weight.grad is not None
    with torch.no_grad():  # merging
        model.base.weight.add_(model.up.weight @ model.down.weight, alpha=2.0)
        model.up.weight.zero_()
        model.up.bias.zero_()
    low = F.linear(batch().to(LOW), model.base.weight.to(LOW), model.base.bias.to(LOW)).float()
    assert torch.equal(model(batch()), low)


def test_tied_weights_get_the_gradients_of_both_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.embed(ids))
            return y

    model = Tied()
    weight = model.embed.weight.detach().clone().requires_grad_()
    autoprec.apply(model, policy(("embed", "fp32"), ("head", "bf16"), ("*", "fp32")))
    ids = torch.tensor([0, 3, 3])
    model(ids).square().sum().backward()
    F.linear(F.embedding(ids, weight).to(LOW), weight.to(LOW)).float().square().sum().backward()
    assert weight.grad is not None
    assert torch.equal(model.embed.weight.grad, weight.grad)  # type: ignore[arg-type]
    assert model.head.weight is model.embed.weight
