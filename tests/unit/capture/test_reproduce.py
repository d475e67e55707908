"""A workload that cannot be reproduced is refused, with the first op that differs and the likely cause."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from autoprec.capture import record, require_reproducible
from autoprec.capture.facts import digest
from autoprec.errors import ReplayError
from autoprec.workload import Workload

_CALLS: list[int] = []
_GLOBAL = torch.zeros(4)
_UNSEEDED = torch.Generator()
_UNSEEDED.seed()


def workload(change: Callable[[torch.Tensor], torch.Tensor]) -> Workload:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(change(x))
            return y

    return Workload(model=Model, batches=lambda: [torch.ones(2, 4)], loss=lambda m, x: m(x).square().mean())


def numpy_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(np.random.default_rng().normal(), dtype=torch.float32)


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(4, generator=_UNSEEDED)


def global_state(x: torch.Tensor) -> torch.Tensor:
    _GLOBAL.add_(1)
    return x + _GLOBAL


def other_path(x: torch.Tensor) -> torch.Tensor:
    _CALLS.append(1)
    return x.exp() if len(_CALLS) % 2 else x.sin()


@pytest.mark.parametrize(
    ("change", "first", "cause"),
    [
        (numpy_noise, r"tensor \(.*test_reproduce.py:\d+\)", "a (number|value) made outside torch"),
        (own_generator, r"randn \(.*test_reproduce.py:\d+\)", "a random generator that the seed does not reach"),
        (global_state, r"constant _constant_0", "a tensor outside the model that changes between runs"),
        (
            other_path,
            r"op :(exp|sin)#0 \(.*test_reproduce.py:\d+\)",
            "control flow that depends on something other",
        ),
    ],
)
def test_the_first_difference_and_its_cause(
    change: Callable[[torch.Tensor], torch.Tensor], first: str, cause: str
) -> None:
    task = workload(change)
    with pytest.raises(ReplayError, match=rf"two runs .* under seed 0 differ, first at {first}; likely cause: {cause}"):
        require_reproducible(record(task), task)


def test_a_reproducible_workload_passes() -> None:
    task = workload(torch.tanh)
    require_reproducible(record(task), task)


def test_a_replay_that_differs_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    task = workload(torch.tanh)
    recording = record(task)

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cos()

    def break_graph(graph_module: torch.fx.GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if node.name == "tanh":
                node.target = broken
        graph_module.recompile()

    from autoprec.capture import recording as module

    original = module._recording
    monkeypatch.setattr(module, "_recording", lambda *a, **k: (r := original(*a, **k), break_graph(r.graph_module))[0])
    break_graph(recording.graph_module)
    with pytest.raises(
        ReplayError, match=r"the replay gives a loss of .* differing first at op :tanh#0 .*global tensor"
    ):
        require_reproducible(recording, task)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_digests_see_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.T.contiguous().T)
    changed = tensor.clone()
    changed[2, 1] = 0
    assert digest(changed) != digest(tensor)
    assert digest(tensor.flip(0)) != digest(tensor)
    assert digest(tensor[:0]) == 0


def test_digests_tell_minus_zero_and_nan_apart() -> None:
    values = [0.0, -0.0, float("nan"), float("inf")]
    assert len({digest(torch.tensor([value])) for value in values}) == len(values)
