"""A training run of about a millisecond a step, with one knob for each thing that can go wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoprec import Workload

Batch = tuple[torch.Tensor, torch.Tensor]


class Mlp(nn.Module):
    """Linear, norm, GELU, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(nn.functional.gelu(self.norm(self.first(x))))
        return y


def batches() -> Iterator[Batch]:
    """Yield eight batches of a learnable task."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(32, 4, generator=generator)
    for _ in range(8):
        x = torch.randn(16, 32, generator=generator)
        yield x, (x @ weights).argmax(1)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def evaluate(model: nn.Module) -> float:
    """Return the loss on all batches; leaves the model in eval mode, as careless code does."""
    model.eval()
    with torch.no_grad():
        return sum(float(loss(model, batch)) for batch in batches()) / 8


def workload(
    *,
    model: Callable[[], nn.Module] = Mlp,
    loss_of: Callable[[Any, Any], torch.Tensor] = loss,
    learning_rate: float = 1e-3,
    with_evaluate: bool = False,
) -> Workload:
    """Return the run."""
    return Workload(
        model=model,
        batches=batches,
        loss=loss_of,
        optimizer=lambda params: torch.optim.SGD(params, lr=learning_rate),
        evaluate=evaluate if with_evaluate else None,
    )
