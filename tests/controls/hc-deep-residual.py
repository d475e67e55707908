"""Sixteen residual blocks with small branches, group norm, and a mean over 48 x 48 pixels."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-deep-residual",
    "source": "own",
    "mechanism": "branches of a tenth keep the stream near one, and the mean is a fused op that accumulates in fp32",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
CHANNELS = 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(3, CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x):
        return x + 0.1 * F.relu(self.conv(self.norm(x)))


class Restorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block() for _ in range(16)))
        self.lift, self.scale = nn.ConvTranspose2d(CHANNELS, 1, 2, stride=2), nn.Linear(CHANNELS, 1)

    def forward(self, image):
        x = self.blocks(self.stem(image))
        return image + self.lift(x) * torch.sigmoid(self.scale(F.adaptive_avg_pool2d(x, 1).flatten(1)))[..., None, None]


def charbonnier(model, batch):
    """Smooth absolute error with a rounding radius of 0.03."""
    gap = model(batch[0]) - batch[1]
    return torch.sqrt(gap * gap + 1e-3).mean()


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        clean = F.interpolate(torch.randn(2, 1, 6, 6, generator=generator), size=(48, 48), mode="bilinear")
        yield clean + 0.3 * torch.randn(2, 1, 48, 48, generator=generator), clean


def workload():
    return autoprec.Workload(
        model=Restorer,
        batches=batches,
        loss=charbonnier,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
