"""Where a loss stops being finite."""

import pytest
import torch
from torch import nn

from autoprec import Workload
from autoprec.analysis.finite import first_non_finite, with_state
from autoprec.capture import Recording, record


class Net(nn.Module):
    """A linear layer, then `after`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


class Log(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * 0 - 1).log().exp()


class Mask(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = super().forward(x).masked_fill(torch.eye(4, dtype=torch.bool), float("-inf"))
        return masked.softmax(-1)


class MaskThenLog(Mask):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).log()


class EmptyRow(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = super().forward(x).masked_fill(torch.ones(4, 4, dtype=torch.bool), float("-inf"))
        return masked.softmax(-1)


def recording(model: type[nn.Module]) -> Recording:
    workload = Workload(model=model, batches=lambda: [torch.ones(4, 4)], loss=lambda net, x: net(x).mean())
    return record(workload)


@pytest.mark.parametrize(
    ("model", "op", "made"),
    [(Log, ":log#0", "nan"), (MaskThenLog, ":log#0", "inf"), (EmptyRow, ":softmax#0", "nan")],
)
def test_the_op_that_makes_it_is_named(model: type[nn.Module], op: str, made: str) -> None:
    origin = first_non_finite(recording(model))
    assert origin is not None
    assert (origin.what, origin.made) == (f"op {op}", made)
    assert "test_finite.py" in origin.source
    assert str(origin).startswith(f"op {op} gives {made} (")


@pytest.mark.parametrize("model", [Net, Mask])
def test_a_finite_loss_has_no_origin_even_with_infinities_inside(model: type[nn.Module]) -> None:
    assert first_non_finite(recording(model)) is None


def test_a_weight_that_is_nan_is_named_itself() -> None:
    step = recording(Net)
    state = {name: torch.full_like(value, torch.nan) for name, value in step.model.state_dict().items()}
    origin = first_non_finite(with_state(step, state, torch.ones(4, 4)))
    assert origin is not None
    assert origin.what in ("parameter linear.weight", "parameter linear.bias")


def test_another_batch_is_looked_at() -> None:
    step = recording(Net)
    state = dict(step.model.state_dict())
    origin = first_non_finite(with_state(step, state, torch.full((4, 4), torch.inf)))
    assert origin is not None


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            self.first.weight.fill_(1.0)
            self.second.weight.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0]).expand(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def test_the_inf_that_a_nan_came_out_of_is_named_too() -> None:
    step = recording(Deep)
    origin = first_non_finite(with_state(step, dict(step.model.state_dict()), torch.full((4, 4), torch.inf)))
    assert origin is not None
    assert origin.what == "op second:linear#0"
    assert "gives nan" in str(origin)
    assert origin.cause.startswith("input batch_0")
    assert str(origin).endswith("out of the inf of input batch_0")
