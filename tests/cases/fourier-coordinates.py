"""A coordinate network feeds sin(2**k pi x) up to k = 9: half precision puts the fast waves at random phases."""
import math

import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "fourier-coordinates",
    "source": "own; ashawkey/torch-ngp#28, threestudio-project/threestudio#138 (fp16 in NeRF code), "
              "EleutherAI/gpt-neox#1016 (the same rounding of phases)",
    "mechanism": "a coordinate near 0.7 is off by 2e-4 in fp16 and 2e-3 in bf16, times 1608 a third to 3 radians",
    "formats": {"fp16": "unsafe", "bf16": "unsafe"},
    "flag_sites": [("encode", "einsum"), ("encode", "sin"), ("encode", "cos")],
    "fix_sites": [("encode", "einsum"), ("encode", "sin"), ("encode", "cos")],
}
BANDS, WIDTH, POINTS = 10, 64, 256


class Encode(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bands", math.pi * 2.0 ** torch.arange(BANDS))

    def forward(self, xy):
        phase = torch.einsum("nc,f->ncf", xy, self.bands).flatten(1)
        return torch.cat([torch.sin(phase), torch.cos(phase)], dim=-1)


class Picture(nn.Module):
    """Colour as a function of the place in one picture."""

    def __init__(self):
        super().__init__()
        self.encode = Encode()
        self.layers = nn.ModuleList([nn.Linear(4 * BANDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, xy):
        x = self.encode(xy)
        for layer in self.layers:
            x = F.relu(layer(x))
        return torch.sigmoid(self.out(x))


def batches():
    """A fine texture with thin stripes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        xy = torch.rand(POINTS, 2, generator=generator)
        stripes = 0.5 + 0.5 * torch.sin(512 * math.pi * xy[:, :1])
        yield xy, torch.cat([stripes, xy], dim=-1)


def workload():
    return autoprec.Workload(
        model=Picture,
        batches=batches,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-3),
    )
