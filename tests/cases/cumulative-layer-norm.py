"""Conv-TasNet's cumulative layer norm sums all frames so far: the running sum of squares passes 65504 in fp16."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "cumulative-layer-norm",
    "source": "pytorch/pytorch#12115, anthonymlortiz/lcn#4",
    "mechanism": "24 channels x 400 frames with squares near 40 sum to 4e5 before the division by the count",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("norm", "cumsum", 1)],
    "fix_sites": [("norm", "cumsum", 1), ("norm", "div", 1)],
}
CHANNELS, FRAMES = 24, 400


class CumulativeNorm(nn.Module):
    """Normalises a frame by the statistics of everything heard so far, so that it can run live."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(CHANNELS, 1))
        self.shift = nn.Parameter(torch.zeros(CHANNELS, 1))

    def forward(self, x):
        count = torch.arange(1, x.shape[-1] + 1, dtype=torch.float32) * CHANNELS
        mean = torch.cumsum(x.sum(1), dim=-1) / count
        power = torch.cumsum(x.pow(2).sum(1), dim=-1) / count
        variance = (power - mean.pow(2))[:, None]
        return (x - mean[:, None]) / (variance + 1e-5).sqrt() * self.gain + self.shift


class Block(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.norm, self.prelu = CumulativeNorm(), nn.PReLU()
        self.depthwise = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=dilation, dilation=dilation, groups=CHANNELS)
        self.pointwise = nn.Conv1d(CHANNELS, CHANNELS, 1)

    def forward(self, x):
        return x + self.pointwise(self.prelu(self.depthwise(self.norm(x))))


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv1d(1, CHANNELS, 16, stride=8, padding=4, bias=False)
        self.norm, self.bottleneck = CumulativeNorm(), nn.Conv1d(CHANNELS, CHANNELS, 1)
        self.blocks = nn.Sequential(Block(1), Block(2), Block(4))
        self.mask = nn.Conv1d(CHANNELS, CHANNELS, 1)
        self.decode = nn.ConvTranspose1d(CHANNELS, 1, 16, stride=8, padding=4, bias=False)
        with torch.no_grad():
            self.encode.weight.mul_(4)
            self.mask.weight.mul_(4)

    def forward(self, wave):
        x = self.encode(wave[:, None])
        return self.decode(x * torch.sigmoid(self.mask(self.blocks(self.bottleneck(self.norm(x)))))).squeeze(1)


def batches():
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(8 * FRAMES) / 100
    for _ in range(8):
        pitch = 6.28 * torch.rand(4, 1, generator=generator) + 6.28
        voice = 2.5 * torch.sin(pitch * time) * (1 + 0.3 * torch.sin(time))
        yield voice + 1.2 * torch.randn(4, 8 * FRAMES, generator=generator), voice


def workload():
    return autoprec.Workload(
        model=Separator,
        batches=batches,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
