"""Small workloads with one fault each, and healthy twins."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from autoprec.workload import Workload


class Ratio(nn.Module):
    """x / (spread + eps): zero by zero where all of x is equal and eps is gone."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.linear, self.eps = nn.Linear(4, 4), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
        return self.linear((x - x.amin(-1, keepdim=True)) / (spread + self.eps))


class Masked(nn.Module):
    """Softmax of scores that are filled where nothing is visible."""

    def __init__(self, fill: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.scores, self.fill = nn.Linear(4, 4), fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x)
        return torch.where(x > 0, scores, self.fill(scores)).softmax(-1)


def rows(*values: list[float]) -> Callable[[], list[torch.Tensor]]:
    """Return a function that yields one batch of these rows."""
    return lambda: [torch.tensor(values)]


ORDINARY, TIED, HIDDEN = [1.0, 2.0, 3.0, -4.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -2.0, -3.0, -4.0]


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def ratio(eps: float, *values: list[float]) -> Workload:
    return Workload(model=lambda: Ratio(eps), batches=rows(*values), loss=squared)


def masked(fill: Callable[[torch.Tensor], float], *values: list[float]) -> Workload:
    return Workload(model=lambda: Masked(fill), batches=rows(*values), loss=squared)


def norms(**optimizer: float) -> Workload:
    """Return a workload with a layer norm, a batch norm and a linear layer, trained by Adam."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=1e-3), nn.LayerNorm(8), nn.Linear(8, 2))

    def batches() -> list[torch.Tensor]:
        return [torch.randn(6, 4, generator=torch.Generator().manual_seed(0))]

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), torch.arange(6) % 2)

    return Workload(
        model=model, batches=batches, loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, **{"lr": 1e-3, **optimizer}),
    )  # fmt: skip
