"""Recordings of small functions of parameters, and formats to run them in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.analysis.low_format import Kernels, LowFormat, low_format
from autoprec.analysis.low_step import Reference, reference_of
from autoprec.capture import Recording, record
from autoprec.graph.site import Site
from autoprec.workload import Workload


class Function(nn.Module):
    """A function of the model and its input; parameters are copies of what is given."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], parameters: dict[str, torch.Tensor]):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def workload(
    function: Callable[[Any, torch.Tensor], Any], *batches: torch.Tensor, **parameters: torch.Tensor
) -> Workload:
    """Return a workload whose loss is `function(model, batch)`, computed in the root module."""
    return Workload(
        model=lambda: Function(function, parameters), batches=lambda: list(batches), loss=lambda net, x: net(x)
    )  # fmt: skip


def recorded(function: Callable[[Any, torch.Tensor], Any], x: torch.Tensor, **parameters: torch.Tensor) -> Recording:
    """Return the recording of `function(model, x)`, which returns the loss."""
    return record(workload(function, x, **parameters))


def referred(function: Callable[[Any, torch.Tensor], Any], x: torch.Tensor, **parameters: torch.Tensor) -> Reference:
    """Return the FP32 step of `function(model, x)`."""
    return reference_of(recorded(function, x, **parameters))


def device_format(name: str) -> LowFormat:
    """Return a format whose kernels are all the CPU's own."""
    return low_format(name, "cpu", (name,))


def format_of(name: str, kernels: Kernels = "ideal") -> LowFormat:
    """Return a format on a device without units for it."""
    return low_format(name, "cpu", (), kernels)


def site(text: str) -> Site:
    """Return a site of the root module, given as `op#index`."""
    return Site.parse(f":{text}")
