"""A weight is cast once an optimizer step, and its cast is never stale."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import swap_tensors
from torch.utils.checkpoint import checkpoint

from autoprec.policy import Policy, Rule
from autoprec.runtime import apply, edits, leaves
from autoprec.runtime import weight_casts as casts_of_weights

BF16 = Policy(name="test", rules=(Rule(sites="*", format="bf16"),))
X = torch.linspace(-1, 1, 3 * 96).reshape(3, 96)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Note the shape of every tensor that is cast to bf16."""
    noted: list[torch.Size] = []
    plain = torch.Tensor.bfloat16

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        noted.append(tensor.shape)
        return plain(tensor)

    table = {**casts_of_weights.CONVERSIONS, torch.bfloat16: noting}
    for place in (casts_of_weights, leaves):
        monkeypatch.setattr(place, "CONVERSIONS", table)
    return noted


def model_of(*, functional: bool = False) -> nn.Module:
    """Return a model with one large weight, used by a module or by functional code."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(96, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if functional:
                return nn.functional.linear(x, self.linear.weight, self.linear.bias)
            output: torch.Tensor = self.linear(x)
            return output

    return Net()


LARGE = torch.Size([96, 96])


@pytest.mark.parametrize("functional", [True, False])
def test_micro_batches_share_the_cast_and_accumulate_as_without_it(casts: list[torch.Size], functional: bool) -> None:
    model = model_of(functional=functional)
    precision = apply(model, BF16)
    for number in range(4):
        x = X * number
        with precision.loss():
            loss = model(x).square().mean()
        loss.backward()
    assert casts.count(LARGE) == 1

    reference = model_of()
    for number in range(4):
        x = (X * number).bfloat16()
        y = nn.functional.linear(x, reference.linear.weight.bfloat16(), reference.linear.bias.bfloat16())  # type: ignore[operator,union-attr]
        y.float().bfloat16().square().mean().backward()
    assert torch.equal(model.linear.weight.grad, reference.linear.weight.grad)  # type: ignore[union-attr]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=3)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_is_seen(backend: str) -> None:
    model = model_of()
    apply(model, BF16)
    optimizer = foreach(model)
    step = torch.compile(lambda: optimizer.step(), backend=backend)
    for _ in range(3):
        model(X).square().mean().backward()
        step()
        assert_fresh(model)


@pytest.mark.parametrize("optimizer", [fused, foreach, lbfgs])
def test_a_step_is_seen(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = model_of()
    apply(model, BF16)
    stepping = optimizer(model)

    def closure() -> torch.Tensor:
        stepping.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    closure()
    stepping.step(closure)  # type: ignore[arg-type]
    assert_fresh(model)


def assert_fresh(model: nn.Module) -> None:
    twin = model_of()
    twin.load_state_dict(model.state_dict())
    apply(twin, BF16)
    assert torch.equal(model(X), twin(X))


def edit_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(3)


def edit_through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(3)


def edit_by_setting_data(weight: nn.Parameter) -> None:
    weight.data = weight.detach() * 3


def edit_by_swapping(weight: nn.Parameter) -> None:
    swap_tensors(weight, nn.Parameter(weight.detach() * 3))


def edit_a_detached_tensor(weight: nn.Parameter) -> None:
    weight.detach().mul_(3)


EDITS = [edit_in_place, edit_through_data, edit_by_setting_data, edit_by_swapping, edit_a_detached_tensor]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_micro_batches_is_seen(edit: Callable[[nn.Parameter], None]) -> None:
    model: Any = model_of()
    apply(model, BF16)
    before = model(X)
    before.sum().backward()
    edit(model.linear.weight)
    assert not torch.equal(model(X), before)
    assert_fresh(model)


def test_an_edit_through_an_alias_made_before_is_seen() -> None:
    model: Any = model_of()
    apply(model, BF16)
    alias = model.linear.weight.data
    array = model.linear.weight.detach().numpy()
    before = model(X)
    before.sum().backward()
    alias.mul_(3)
    after = model(X)
    assert not torch.equal(after, before)
    np.multiply(array, 3, out=array)
    assert not torch.equal(model(X), after)
    assert_fresh(model)


def test_an_edit_through_data_in_the_middle_of_a_forward_is_seen() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(96, 96, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = self.linear(x)
            self.linear.weight.data.zero_()
            return first, self.linear(x)

    model = Twice()
    apply(model, BF16)
    first, second = model(X)
    assert first.abs().sum() > 0
    assert second.abs().sum() == 0


@pytest.mark.parametrize("assign", [True, False])
def test_a_loaded_state_is_seen(assign: bool) -> None:
    model = model_of()
    apply(model, BF16)
    before = model(X)
    before.sum().backward()
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()}, assign=assign)
    assert not torch.equal(model(X), before)
    assert_fresh(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_runs_again_sees_the_weight_as_it_is(reentrant: bool) -> None:
    model: Any = model_of()
    apply(model, BF16)
    used: list[torch.Tensor] = []

    class Recomputed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            used.append(model.linear.weight.detach().clone())
            y: torch.Tensor = model(x)
            return y.sin()

    y = checkpoint(Recomputed(), X.clone().requires_grad_(), use_reentrant=reentrant)
    assert y is not None
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.zero_()
    y.sum().backward()
    assert len(used) == 2
    assert_fresh(model)
    assert model(X).abs().sum() == 0


def test_a_forward_without_gradients_neither_makes_nor_spoils_a_cast(casts: list[torch.Size]) -> None:
    model: Any = model_of()
    apply(model, BF16)
    with torch.no_grad():
        model(X)
    model(X).sum().backward()
    assert model.linear.weight.grad is not None
    assert casts.count(LARGE) == 2
    with torch.no_grad():
        model(X)
    model(X).sum().backward()
    assert casts.count(LARGE) == 3


def test_the_memory_of_the_casts_is_free_in_the_step() -> None:
    model: Any = model_of()
    precision = apply(model, BF16)
    kept = precision.kept_casts
    model(X).sum().backward()
    assert len(kept) == 1
    seen: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(kept)))
    optimizer.step()
    model(X)
    precision.remove()
    assert len(kept) == 0


def test_a_loop_of_one_forward_a_step_keeps_no_casts(casts: list[torch.Size]) -> None:
    model: Any = model_of()
    kept = apply(model, BF16).kept_casts
    optimizer, other = foreach(model), foreach(nn.Linear(2, 2))
    model(X).sum().backward()
    optimizer.step()
    for _ in range(2):
        with torch.no_grad():
            model(X)  # one that validates has no casts to share
        model(X).sum().backward()
        assert len(kept) == 0
        other.step()
        optimizer.step()
    assert casts.count(LARGE) == 1 + 4


def test_a_second_forward_before_the_step_shares_casts_from_then_on(casts: list[torch.Size]) -> None:
    model: Any = model_of()
    kept = apply(model, BF16).kept_casts
    optimizer = foreach(model)
    model(X).sum().backward()
    optimizer.step()
    casts.clear()
    for expected in (0, 1, 1):
        model(X).sum().backward()
        assert len(kept) == expected
    assert casts.count(LARGE) == 2
    optimizer.step()
    for _ in range(3):
        model(X).sum().backward()
    assert casts.count(LARGE) == 3
    assert_fresh(model)


def test_the_casts_of_frozen_weights_are_kept_by_a_loop_of_one_forward_a_step(casts: list[torch.Size]) -> None:
    model: Any = nn.Sequential(model_of(), nn.Linear(96, 128))
    model[0].requires_grad_(False)
    kept = apply(model, BF16).kept_casts
    optimizer = foreach(model[1])
    for number in range(3):
        model(X).sum().backward()
        assert len(kept) == (2 if number == 0 else 1)  # nobody knows before the first step
        optimizer.step()
    assert casts.count(LARGE) == 1
    with torch.no_grad():
        model[0].linear.weight.mul_(2.0)
    model(X)
    assert casts.count(LARGE) == 2


def test_the_steps_of_other_optimizers_say_nothing_of_what_is_shared(casts: list[torch.Size]) -> None:
    model: Any = model_of()
    apply(model, BF16)
    optimizer, other = foreach(model), foreach(nn.Linear(2, 2))
    for _ in range(2):
        for _ in range(2):
            model(X).sum().backward()
            other.step()
        optimizer.step()
    assert casts.count(LARGE) == 2


def test_the_step_of_another_optimizer_keeps_the_casts(casts: list[torch.Size]) -> None:
    model: Any = model_of()
    apply(model, BF16)
    model(X).sum().backward()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    model(X)
    assert casts.count(LARGE) == 1


def test_a_cast_made_inside_a_transform_dies_with_it() -> None:
    model: Any = model_of()
    apply(model, BF16)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(model, weights, (x,))
        return y.square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, X)
    assert gradients["linear.weight"].shape == (3, 96, 96)
    torch.func.vmap(lambda x: model(x))(X)
    model(X).sum().backward()
    assert model.linear.weight.grad is not None


def test_one_model_in_two_threads_accumulates_both_gradients() -> None:
    model: Any = model_of()
    apply(model, BF16)

    def work() -> None:
        for _ in range(5):
            model(X).sum().backward()

    work()
    alone = model.linear.weight.grad.clone()
    model.zero_grad()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(model.linear.weight.grad, alone * 2)


def test_a_tied_weight_is_cast_once(casts: list[torch.Size]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(96, 96)
            self.two = nn.Linear(96, 96)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.two(self.one(x))
            return y

    model = Tied()
    apply(model, BF16)
    model(X).sum().backward()
    assert casts.count(LARGE) == 1


def test_a_frozen_weight_is_cast_once_too(casts: list[torch.Size]) -> None:
    model: Any = model_of()
    model.linear.weight.requires_grad_(requires_grad=False)
    apply(model, BF16)
    for _ in range(3):
        model(X).sum().backward()
    assert casts.count(LARGE) == 1
    edit_in_place(model.linear.weight)
    assert_fresh(model)


def test_inference_weights_are_cast_anew() -> None:
    with torch.inference_mode():
        model = model_of()
        apply(model, BF16)
        before = model(X)
        model.linear.weight.zero_()  # type: ignore[operator,union-attr]
        assert not torch.equal(model(X), before)


def test_a_weight_that_is_unfrozen_is_trained() -> None:
    model: Any = model_of()
    model.linear.requires_grad_(requires_grad=False)
    apply(model, BF16)
    model(X.clone().requires_grad_()).sum().backward()
    model.linear.requires_grad_(requires_grad=True)
    model(X).sum().backward()
    assert model.linear.weight.grad is not None
    assert model.linear.bias.grad is not None
    model.linear.requires_grad_(requires_grad=False)
    assert not model(X).requires_grad


@pytest.mark.parametrize("size", [8, 96])
def test_a_cast_made_in_inference_mode_ends_with_it(size: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(size, size).requires_grad_(requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                self.frozen(x)
            y: torch.Tensor = self.frozen(x)
            return y

    model = Net()
    apply(model, BF16)
    x = torch.ones(2, size, requires_grad=True)
    model(x * 2).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("functional", [True, False])
def test_a_fused_step_inside_the_loss_block_is_seen(functional: bool) -> None:
    model: Any = model_of()
    precision = apply(model, BF16)
    optimizer = fused(model)

    def head() -> torch.Tensor:
        if functional:
            return nn.functional.linear(X, model.linear.weight, model.linear.bias)
        y: torch.Tensor = model.linear(X)
        return y

    with precision.loss():
        head().sum().backward()
        before = head()
        optimizer.step()
        assert not torch.equal(head(), before)


def test_weights_that_were_exchanged_are_given_free() -> None:
    model: Any = model_of()
    precision = apply(model, BF16)
    gone = weakref.ref(model.linear.weight)
    for _ in range(3):
        model(X).sum()
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(X).sum()
    kept = precision.kept_casts
    assert kept is not None
    assert len(kept) == 1
    gc.collect()
    assert gone() is None


def test_no_forward_leaves_a_trace() -> None:
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert edits._running, "somebody is told of edits while the model runs"
            raise ValueError("in the middle")

    model = nn.Sequential(nn.Linear(4, 4), Failing(4, 4))
    apply(model, BF16)
    with pytest.raises(ValueError, match="in the middle"):
        model(torch.ones(2, 4, requires_grad=True))
    assert not edits._running


def test_models_may_begin_while_another_thread_steps() -> None:
    """A set of those who are told would change under the thread that tells them."""
    model, other = model_of(), nn.Linear(2, 2)
    apply(model, BF16)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    failures: list[BaseException] = []
    done = threading.Event()

    def step() -> None:
        try:
            while not done.is_set():
                optimizer.step()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    for _ in range(100):
        model(X)
    done.set()
    thread.join()
    assert not failures


@pytest.mark.parametrize("size", [8, 96])
@pytest.mark.parametrize("functional", [False, True])
def test_an_edit_between_two_uses_in_one_forward_is_seen(functional: bool, size: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(size, size, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            use = partial(nn.functional.linear, weight=self.linear.weight) if functional else self.linear
            first = use(x)
            with torch.no_grad():
                self.linear.weight.neg_()
            return first, use(x)

    model = Twice()
    apply(model, BF16)
    for _ in range(2):
        first, second = model(torch.ones(1, size))
        assert torch.equal(first, -second)


def test_a_closure_that_runs_the_model_inside_a_fused_step_leaves_no_stale_cast() -> None:
    model = model_of()
    apply(model, BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(X).square().sum()
            loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        assert torch.equal(model(X), copied(model)(X))


def test_memory_that_was_exchanged_without_a_version_is_seen() -> None:
    model = model_of()
    model.linear.weight = nn.Parameter(torch.zeros(96, 96), requires_grad=False)
    other = nn.Parameter(torch.ones(96, 96), requires_grad=False)
    apply(model, BF16)
    optimizer = fused(model)
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step()
    before, version = model(X), model.linear.weight._version
    swap_tensors(model.linear.weight, other)
    assert model.linear.weight._version == version
    assert not torch.equal(model(X), before)
    assert torch.equal(model(X), copied(model)(X))


def copied(model: nn.Module) -> nn.Module:
    """Return a model with the same weights that runs the policy for the first time."""
    twin = model_of()
    twin.load_state_dict(model.state_dict())
    apply(twin, BF16)
    return twin
