"""Weight-standardised convolutions with eps 1e-10: decayed kernels have a variance that fp16 rounds to zero."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "weight-standardise-decayed",
    "source": "joe-siyuan-qiao/WeightStandardization#19, joe-siyuan-qiao/WeightStandardization#16, "
              "implus/PytorchInsight#32",
    "mechanism": "the scale of a standardised weight is free, so decay shrinks it to 1e-4; its variance 1e-8 and "
                 "eps are 0 in fp16, and w / sqrt(0) is inf",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("stages.1.conv", "var_mean"), ("stages.1.conv", "sub"), ("stages.1.conv", "add"), ("stages.1.conv", "sqrt"),
                   ("stages.1.conv", "div")],
    "fix_sites": [("stages.1.conv", "var_mean"), ("stages.1.conv", "add"), ("stages.1.conv", "sqrt"),
                  ("stages.1.conv", "sub"), ("stages.1.conv", "div")],
}


class StdConv2d(nn.Conv2d):
    def forward(self, x):
        variance, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        weight = (self.weight - mean) / torch.sqrt(variance + 1e-10)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Stage(nn.Module):
    """Pre-activation residual stage of a BiT network."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv = StdConv2d(channels, channels, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return x + self.gain * self.conv(F.relu(self.norm(x)))


class BiT(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.stem = StdConv2d(3, channels, 3, padding=1)
        self.stages = nn.ModuleList(Stage(channels) for _ in range(3))
        self.norm, self.head = nn.GroupNorm(4, channels), nn.Linear(channels, 4)
        with torch.no_grad():  # hundreds of epochs of weight decay on one stage
            self.stages[1].conv.weight.normal_(std=1.2e-4)

    def forward(self, images):
        x = self.stem(images)
        for stage in self.stages:
            x = F.avg_pool2d(stage(x), 2)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        label = torch.randint(0, 4, (48,), generator=generator)
        ramp = torch.linspace(-1, 1, 16) * torch.tensor([-1.5, -0.5, 0.5, 1.5])[label][:, None]
        yield ramp[:, None, None, :] + 0.25 * torch.randn(48, 3, 16, 16, generator=generator), label


def workload():
    return autoprec.Workload(
        model=BiT,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4, weight_decay=1e-4),
    )
