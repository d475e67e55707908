"""A ported group norm takes E[x*x] - E[x]**2; features on an offset of 20 leave only rounding noise, or a negative."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "group-norm-uncentred",
    "source": "PaddlePaddle/Paddle#16654, PaddlePaddle/Paddle#33176, anthonymlortiz/lcn#4",
    "mechanism": "400.3 minus 400 with a spacing of 2 in bf16 and 0.25 in fp16: the variance is noise or below zero",
    "formats": {"fp16": "unsafe", "bf16": "unsafe"},
    "flag_sites": [("norm", "mul", 0), ("norm", "mean"), ("norm", "mul", 1), ("norm", "sub", 0)],
    "fix_sites": [("norm", "mul", 0), ("norm", "mul", 1), ("norm", "mean"), ("norm", "sub"), ("norm", "clamp"),
                  ("norm", "add", 0), ("norm", "rsqrt"), ("norm", "mul", 2)],
}


class PortedGroupNorm(nn.Module):
    def __init__(self, groups, channels):
        super().__init__()
        self.groups = groups
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x):
        flat = x.unflatten(1, (self.groups, -1)).flatten(2)
        mean = flat.mean(-1, keepdim=True)
        variance = torch.mean(flat * flat, dim=-1, keepdim=True) - mean * mean
        flat = (flat - mean) * torch.rsqrt(variance.clamp(min=0.0) + 1e-5)
        return flat.view_as(x) * self.gain + self.shift


class DepthNet(nn.Module):
    """Monocular depth: metres in, a correction out; the scene is some 20 m away."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 16, 3, padding=1)
        self.norm = PortedGroupNorm(4, 16)
        self.deep = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.deep_norm = nn.GroupNorm(4, 24)
        self.lift = nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)
        with torch.no_grad():
            self.stem.bias.fill_(20.0)

    def forward(self, images):
        x = F.silu(self.norm(self.stem(images)))
        return self.out(F.silu(self.lift(F.silu(self.deep_norm(self.deep(x))))) + x)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        field = F.interpolate(torch.randn(8, 1, 4, 4, generator=generator), size=(20, 20), mode="bicubic")
        noisy = field + 0.3 * torch.randn(8, 1, 20, 20, generator=generator)
        yield torch.cat([noisy, noisy.abs()], dim=1), field


def workload():
    return autoprec.Workload(
        model=DepthNet,
        batches=batches,
        loss=lambda model, batch: F.smooth_l1_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
