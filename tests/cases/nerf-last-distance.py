"""NeRF gives the last sample of a ray the distance 1e10; fp16 has no such number and empty space becomes 0 * inf."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "nerf-last-distance",
    "source": "ashawkey/torch-ngp#28, threestudio-project/threestudio#138, Totoro97/f2-nerf#33",
    "mechanism": "1e10 is inf in fp16; a ReLU density of 0 at the far end makes 0 * inf = NaN in the opacity",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("render", "cat"), ("render", "mul", 0)],
    "fix_sites": [("render", "cat"), ("render", "mul", 0), ("render", "neg"), ("render", "exp")],
}
RAYS, SAMPLES, WIDTH = 48, 24, 64


class Render(nn.Module):
    """Alpha compositing along each ray."""

    def forward(self, density, colour, depth):
        gap = depth[:, 1:] - depth[:, :-1]
        gap = torch.cat([gap, torch.tensor([1e10]).expand(len(gap), 1)], dim=-1)
        alpha = 1.0 - torch.exp(-(F.relu(density) * gap))
        clear = torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha[:, :-1] + 1e-10], dim=-1)
        weight = alpha * torch.cumprod(clear, dim=-1)
        return (weight[..., None] * colour.sigmoid()).sum(1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(27, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH + 27, WIDTH)
        self.density, self.colour = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)
        self.render = Render()

    def forward(self, points, depth):
        waves = [f(points * 2 ** k) for k in range(4) for f in (torch.sin, torch.cos)]
        code = torch.cat([points, *waves], dim=-1)
        x = F.relu(self.second(F.relu(self.first(code))))
        x = F.relu(self.third(torch.cat([x, code], dim=-1)))
        return self.render(self.density(x).squeeze(-1), self.colour(x), depth)


def batches():
    """Rays through a ball in front of nothing."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        origin = torch.cat([0.6 * torch.randn(RAYS, 2, generator=generator), torch.full((RAYS, 1), -2.0)], dim=-1)
        direction = F.normalize(torch.tensor([0.0, 0.0, 1.0]) + 0.1 * torch.randn(RAYS, 3, generator=generator), dim=-1)
        depth = 1 + 2 * (torch.arange(SAMPLES) + torch.rand(RAYS, SAMPLES, generator=generator)) / SAMPLES
        points = origin[:, None] + depth[..., None] * direction[:, None]
        hit = (points.norm(dim=-1).amin(1) < 0.7).float()[:, None]
        yield points, depth, hit * torch.tensor([0.9, 0.3, 0.2])


def workload():
    return autoprec.Workload(
        model=Field,
        batches=batches,
        loss=lambda model, batch: F.mse_loss(model(batch[0], batch[1]), batch[2]),
        optimizer=lambda params: torch.optim.Adam(params, lr=5e-4),
    )
