"""Whatever a step writes to, a replay begins from what was there before and leaves model and batch alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.capture import Recording, record
from autoprec.capture.memory import fresh
from autoprec.errors import CaptureError
from tests.unit.capture.steps import Parts, Run, Step, check_faithful, gradients, step


def twos() -> torch.Tensor:
    return torch.full((4,), 2.0)


def written_then_saved(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.run_mean.mul_(0.5)
    return m.one(x) * m.run_mean  # type: ignore[no-any-return]


def with_codebook(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.one(x)
    with torch.no_grad():
        m.book.mul_(0.5)
    return y * m.book  # type: ignore[no-any-return]


def through_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.one(x)
    m.book.data.mul_(0.5)
    m.two.bias.data[0] = 3
    m.two.weight.data = torch.full((4, 4), 0.25)
    return m.two(y) * m.book  # type: ignore[no-any-return]


def growing(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.cache = torch.cat([m.cache, m.one(x).detach()])
    return m.one(x) * m.cache.sum(0)  # type: ignore[no-any-return]


def reassigned_with_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.run_mean = m.run_mean * 0.5 + m.one(x).mean(0)
    return m.one(x) * m.run_mean  # type: ignore[no-any-return]


def written_with_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.run_mean.mul_(0.5).add_(m.one(x).mean(0))
    return m.one(x) * m.run_mean  # type: ignore[no-any-return]


def first_touched_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.plain.add_(1)
    return m.one(x) * m.plain  # type: ignore[no-any-return]


def part_of_a_plain_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.plain[1:].add_(1)
    return m.one(x) * m.plain  # type: ignore[no-any-return]


def through_numpy(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.one(x) * torch.from_numpy(m.table).add_(1)  # type: ignore[no-any-return]


def freezing(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.two.requires_grad_(False)
    y: torch.Tensor = m.two(m.one(x))
    m.two.weight.requires_grad = True
    return y


def input_that_requires_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(m.one(x).sin().sum(), x, create_graph=True)
    return slope * m.two(x)  # type: ignore[no-any-return]


def filled_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.late = m.one(x).detach()
    return m.two(x) * m.late  # type: ignore[no-any-return]


def registered_late(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.register_buffer("late", m.one(x).detach())
    return m.two(x) * m.late  # type: ignore[no-any-return]


def book() -> dict[str, Any]:
    return {"book": nn.Parameter(torch.ones(4))}


def running() -> dict[str, Any]:
    return {"run_mean": twos()}


STEPS: dict[str, tuple[Run, Parts]] = {
    "a buffer that is then saved for backward": (written_then_saved, running),
    "the batch": (lambda m, x: m.one(x.mul_(2)), dict),
    "a parameter under no_grad": (with_codebook, book),
    "a parameter through data": (through_data, book),
    "an embedding that shortens its rows": (
        lambda m, x: m.rows(torch.arange(3)) * m.one(x),
        lambda: {"rows": nn.Embedding(3, 4, max_norm=0.5)},
    ),
    "a buffer that grows": (growing, lambda: {"cache": torch.ones(1, 4)}),
    "a buffer reassigned with grad": (reassigned_with_grad, running),
    "a buffer written with grad": (written_with_grad, running),
    "a buffer that was None": (filled_later, lambda: {"late": None}),
    "a plain tensor": (first_touched_in_place, lambda: {"plain": twos()}),
    "a part of a plain tensor": (part_of_a_plain_tensor, lambda: {"plain": twos()}),
    "a plain tensor inside a fused kernel": (
        lambda m, x: F.batch_norm(m.one(x), m.plain, m.also_plain, training=True) * m.plain,
        lambda: {"plain": twos(), "also_plain": twos()},
    ),
    "a numpy array": (through_numpy, lambda: {"table": np.arange(4, dtype="float32")}),
    "a numpy array among the arguments": (
        lambda m, x: m.one(x) * torch.as_tensor(m.table).add_(1),
        lambda: {"table": np.arange(4, dtype="float32")},
    ),
    "a buffer registered in the step": (registered_late, dict),
    "flags of parameters": (freezing, dict),
    "the flag of the batch": (input_that_requires_grad, dict),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_replay_is_the_plain_step_whatever_is_written(what: str) -> None:
    run, parts = STEPS[what]
    check_faithful(step(run, parts, plain=("plain", "also_plain")))


def test_a_write_through_a_plain_view_of_a_buffer() -> None:
    table = torch.ones(2, 4)

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.plain.add_(1)
        return m.one(x) * m.run_mean  # type: ignore[no-any-return]

    def parts() -> dict[str, Any]:
        copy = table.clone()
        return {"run_mean": copy[0], "plain": copy[0, 1:]}

    check_faithful(step(run, parts, plain=("plain",)))


def test_the_gradient_of_a_replay_uses_what_the_step_wrote() -> None:
    recording = record(step(written_then_saved, running))
    wanted = recording.replay()
    assert recording.written == {"run_mean"}
    assert torch.equal(gradients(wanted, recording.model)["one.bias"], _bias_gradient(recording))


def _bias_gradient(recording: Recording) -> torch.Tensor:
    """2 * (Wx + b) summed over the batch, since run_mean is 1 when it is read."""
    with torch.no_grad():
        return (recording.model.one(*recording.inputs) * 2).sum(0)  # type: ignore[operator]


def test_only_what_is_written_is_copied() -> None:
    recording = record(step(with_codebook, lambda: {**book(), "constant": twos()}))
    assert recording.written == {"book"}


def test_a_constant_keeps_its_value_when_its_tensor_changes_later() -> None:
    models: list[Step] = []

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        models.append(m)
        return m.one(x) * m.plain  # type: ignore[no-any-return]

    recording = record(step(run, lambda: {"plain": twos()}, plain=("plain",)))
    models[0].plain.zero_()  # type: ignore[operator]
    assert recording.replay_matches


class Halved(torch.autograd.Function):
    """Writes to its second argument, unseen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5)
        return x * state

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def test_a_custom_function_may_write_to_a_buffer() -> None:
    check_faithful(step(lambda m, x: Halved.apply(m.one(x), m.run_mean) * m.run_mean, running))


def test_a_custom_function_that_writes_to_a_parameter_is_refused() -> None:
    task = step(
        lambda m, x: Halved.apply(m.one(x), m.book), lambda: {"book": nn.Parameter(twos(), requires_grad=False)}
    )
    with pytest.raises(CaptureError, match=r"test_memory.py:\d+ writes to a parameter inside a call.*a buffer"):
        record(task)


def test_fresh_copies_share_memory_as_the_originals_do() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    copies: dict[int, Any] = {}
    row, column = fresh(base[1], copies), fresh(base.T[2], copies)
    row[2] = 9
    assert column.tolist() == [2, 9]
    assert base[1, 2] == 5


def test_fresh_copies_keep_conjugates_and_gradients() -> None:
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(fresh(conjugate, {}), conjugate)
    weight = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        copy = fresh(weight, {})
    copy.sum().backward()
    assert weight.grad is not None
