"""Recordings of a few lines of torch, for tests of what is read off a graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.capture import Recording, record
from autoprec.workload import Workload


class Lines(nn.Module):
    """Runs `lines(x, ...)` of the batch, whose first element it multiplies by a weight of one."""

    def __init__(self, lines: Callable[..., Any]) -> None:
        super().__init__()
        self.lines, self.weight = lines, nn.Parameter(torch.ones(()))

    def forward(self, *batch: torch.Tensor) -> Any:
        return self.lines(*batch)


def recorded(lines: Callable[..., Any], *batch: torch.Tensor) -> Recording:
    """Return the recording of a step in which a model runs `lines` on `batch`; its loss is the weight."""

    def loss(model: nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        model(*given)
        return model.weight * 1

    return record(Workload(model=lambda: Lines(lines), batches=lambda: [batch], loss=loss))
