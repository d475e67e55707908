"""A step given as a function, and what a faithful recording of it owes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from autoprec.capture import Recording, record, require_reproducible
from autoprec.workload import Workload
from autoprec.workload.seeding import seeded

Run = Callable[..., Any]
Parts = Callable[[], dict[str, Any]]


class Step(nn.Module):
    """A module whose forward is a function of the module and the input; tensors among its parts are buffers."""

    def __init__(self, run: Run, parts: dict[str, Any], plain: Iterable[str] = ()) -> None:
        super().__init__()
        self.run = run
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, part in parts.items():
            is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter) and name not in plain
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def step(run: Run, parts: Parts = dict, plain: Iterable[str] = ()) -> Workload:
    return Workload(
        model=lambda: Step(run, parts(), plain), batches=lambda: [batch()], loss=lambda m, x: m(x).square().sum()
    )


def gradients(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_faithful(task: Workload) -> Recording:
    """Record `task`; its replays give the plain step's loss and gradients, and leave model and batch as they were."""
    with seeded(0, 0):
        plain_model = task.model()
    with seeded(0, 1):
        plain_loss = task.loss(plain_model, batch())
    wanted = gradients(plain_loss, plain_model)
    with seeded(0, 0):
        fresh_model = task.model()
    recording = record(task)
    assert recording.loss == plain_loss.item()
    _check_same_state(recording, fresh_model)
    for _ in range(2):
        loss = recording.replay()
        assert loss.item() == recording.loss
        found = gradients(loss, recording.model)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name
        _check_same_state(recording, fresh_model)
    require_reproducible(recording, task)
    with seeded(0, 1):
        assert recording.graph_module(*recording.inputs).item() == recording.loss
    assert torch.is_grad_enabled()
    return recording


def _check_same_state(recording: Recording, fresh: nn.Module) -> None:
    state = recording.model.state_dict()
    assert state.keys() == fresh.state_dict().keys()
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(state[name], tensor), name
    flags = [p.requires_grad for p in recording.model.parameters()]
    assert flags == [p.requires_grad for p in fresh.parameters()]
    assert all(tensor.grad_fn is None for tensor in recording.model.buffers())
    assert [(tensor.requires_grad, tensor.tolist()) for tensor in recording.inputs] == [(False, batch().tolist())]
