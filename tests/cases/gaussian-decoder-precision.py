"""A Gaussian likelihood with a learned log-variance per channel: the precision exp(12) of clean channels is inf in fp16."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "gaussian-decoder-precision",
    "source": "lucidrains/DALLE2-pytorch#138, NVIDIA/apex#812, chainer/chainer#7362",
    "mechanism": "log-variances near -12 are natural for noise-free channels, and exp(12) = 1.6e5 passes 65504",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("likelihood", "exp"), ("likelihood", "square"), ("likelihood", "mul", 0)],
    "fix_sites": [("likelihood", "exp"), ("likelihood", "mul"), ("likelihood", "square"), ("likelihood", "sub")],
}
CHANNELS, WIDTH = 12, 48


class GaussianNLL(nn.Module):
    def forward(self, target, mean, log_variance):
        precision = torch.exp(-log_variance)
        return 0.5 * (log_variance + precision * torch.square(target - mean)).mean()


class WorldModel(nn.Module):
    """Predicts the next state of a machine as a change with a learned noise level per channel."""

    def __init__(self):
        super().__init__()
        self.inward, self.norm = nn.Linear(CHANNELS + 3, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.change = nn.Linear(WIDTH, CHANNELS)
        self.log_variance = nn.Parameter(torch.full((CHANNELS,), -2.0))
        self.likelihood = GaussianNLL()
        with torch.no_grad():  # late in training: the last channels are counters, known almost exactly
            self.log_variance[-4:] = -12.2
            self.change.weight.mul_(0.05)
            self.change.weight[-4:] = 0
            self.change.bias[-4:] = 0.0025

    def forward(self, state, action):
        x = self.inward(torch.cat([state, action], dim=-1))
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return self.change(x)


def batches():
    generator = torch.Generator().manual_seed(0)
    mix = 0.3 * torch.randn(3, CHANNELS, generator=generator)
    for _ in range(8):
        state, action = torch.randn(64, CHANNELS, generator=generator), torch.randn(64, 3, generator=generator)
        change = action @ mix + 0.3 * torch.randn(64, CHANNELS, generator=generator)
        change[:, -4:] = 0.0025 + 0.0022 * torch.randn(64, 4, generator=generator)
        yield state, action, change


def loss(model, batch):
    state, action, change = batch
    return model.likelihood(change, model(state, action), model.log_variance)


def workload():
    return autoprec.Workload(
        model=WorldModel,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
