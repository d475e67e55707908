"""Short runs whose gradients are given: the loss is the sum of weight times batch."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from autoprec.analysis.short_run import ShortRun, short_run
from autoprec.analysis.stored_values import StoredFault
from autoprec.workload import Workload

Make = Callable[[object], torch.optim.Optimizer]


class Weight(nn.Module):
    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))


def sgd(lr: float = 1.0, **settings: float) -> Make:
    return lambda params: torch.optim.SGD(params, lr=lr, **settings)


def adam(**settings: object) -> Make:
    return lambda params: torch.optim.Adam(params, **settings)


def workload_of(values: Sequence[float], gradients: Sequence[Sequence[float]], make: Make) -> Workload:
    return Workload(
        model=lambda: Weight(values), batches=lambda: [torch.tensor(each) for each in gradients],
        loss=lambda model, batch: (model.weight * batch).sum(), optimizer=make,
    )  # fmt: skip


def run_of(values: Sequence[float], gradients: Sequence[Sequence[float]], make: Make) -> ShortRun:
    workload = workload_of(values, gradients, make)
    return short_run(workload, list(workload.batches()), device="cpu", seed=0)


def only(faults: Sequence[StoredFault], format_name: str, name: str = "weight") -> StoredFault:
    (found,) = [each for each in faults if each.format == format_name and each.name == name]
    return found
