"""A physics-informed network takes metres: over two millimetres the second derivative is 1e6 and overflows fp16."""
import torch
from torch import nn

import autoprec

CASE = {
    "id": "pinn-metres",
    "source": "NVIDIA/physicsnemo-sym#160, Lightning-AI/pytorch-lightning#12600, pytorch/pytorch#193012",
    "mechanism": "each derivative by x passes the backward of x * 1000: the second is 1e6 times a curvature of one; "
                 "no forward value is above 1000",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("to_units", "mul", 0), ("@loss", "mul", 0)],
    "fix_sites": [("to_units", "mul", 0), ("@loss", "mul", 0)],
}
DIFFUSIVITY, POINTS = 1e-7, 96


class ToUnits(nn.Module):
    """Metres and seconds to numbers around one."""

    def forward(self, place, time):
        return torch.cat([place * 1000.0, time * 0.1], dim=-1)


class Rod(nn.Module):
    """Temperature of a thin rod."""

    def __init__(self):
        super().__init__()
        self.to_units = ToUnits()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 32)])
        self.out = nn.Linear(32, 1)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(1.8)

    def forward(self, place, time):
        x = self.to_units(place, time)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def loss(model, batch):
    place, time, start = batch
    place, time = place.clone().requires_grad_(), time.clone().requires_grad_()
    heat = model(place, time)
    by_place, by_time = torch.autograd.grad(heat.sum(), (place, time), create_graph=True)
    bend, = torch.autograd.grad(by_place.sum(), place, create_graph=True)
    residual = by_time - DIFFUSIVITY * bend
    at_start = model(place.detach(), torch.zeros_like(time)) - start
    return at_start.square().mean() + 10 * residual.square().mean()


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        place = 2e-3 * torch.rand(POINTS, 1, generator=generator)
        time = 10 * torch.rand(POINTS, 1, generator=generator)
        yield place, time, torch.sin(1571 * place)


def workload():
    return autoprec.Workload(
        model=Rod,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
