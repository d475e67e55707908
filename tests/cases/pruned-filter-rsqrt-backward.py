"""An instance norm by hand meets a pruned filter in one of six blocks: rsqrt is 1000 there, and its backward cubes that."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "pruned-filter-rsqrt-backward",
    "source": "anthonymlortiz/lcn#4, pytorch/pytorch#40497, traveller59/spconv#513",
    "mechanism": "the slope of rsqrt is -x**-1.5 / 2 = 5e8 at 1e-6, inf in fp16, times a gradient of 0 is NaN; "
                 "the forward pass is right",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("blocks.3.norm_b", "rsqrt")],
    "fix_sites": [("blocks.3.norm_b", "rsqrt")],
}
CHANNELS = 16


class InstanceNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(CHANNELS, 1, 1))
        self.shift = nn.Parameter(torch.zeros(CHANNELS, 1, 1))

    def forward(self, x):
        mean = x.mean(dim=(2, 3), keepdim=True)
        variance = torch.var(x, dim=(2, 3), keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(variance + 1e-6) * self.gain + self.shift


class PrunedConv(nn.Conv2d):
    """Convolution without bias whose pruned filters are held at zero by a mask."""

    def __init__(self):
        super().__init__(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.register_buffer("mask", torch.ones(CHANNELS, 1, 1, 1))

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, padding=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_a, self.conv_b = PrunedConv(), PrunedConv()
        self.norm_a, self.norm_b = InstanceNorm(), InstanceNorm()

    def forward(self, x):
        y = F.relu(self.norm_a(self.conv_a(x)))
        return x + 0.3 * F.relu(self.norm_b(self.conv_b(y)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.out = nn.Conv2d(CHANNELS, 1, 3, padding=1)
        self.blocks[3].conv_b.mask[5] = 0

    def forward(self, image):
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return image - self.out(x)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        clean = F.interpolate(torch.randn(6, 1, 4, 4, generator=generator), size=(16, 16), mode="bilinear")
        yield clean + 0.3 * torch.randn(6, 1, 16, 16, generator=generator), clean


def workload():
    return autoprec.Workload(
        model=Denoiser,
        batches=batches,
        loss=lambda model, batch: F.l1_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
