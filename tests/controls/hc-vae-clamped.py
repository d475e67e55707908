"""A VAE exponentiates log-variances, but only after clamping them to [-4, 4]."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-vae-clamped",
    "source": "own",
    "mechanism": "exp of a bounded number is bounded: 0.02 to 55, well inside both formats",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
LATENT, WIDTH = 6, 64


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.norm = nn.Linear(36, WIDTH), nn.LayerNorm(WIDTH)
        self.mean, self.log_variance = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, LATENT)
        self.decode, self.paint = nn.Linear(LATENT, WIDTH), nn.Linear(WIDTH, 36)

    def forward(self, x):
        h = self.norm(F.silu(self.encode(x)))
        mean, log_variance = self.mean(h), self.log_variance(h).clamp(-4.0, 4.0)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
        rebuilt = self.paint(F.silu(self.decode(mean + torch.exp(0.5 * log_variance) * noise)))
        divergence = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return rebuilt, divergence


def batches():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(4, 36, generator=generator) / 2
    for _ in range(8):
        yield torch.tanh(torch.randn(96, 4, generator=generator) @ mix)


def loss(model, x):
    rebuilt, divergence = model(x)
    return F.mse_loss(rebuilt, x) + 0.01 * divergence


def workload():
    return autoprec.Workload(
        model=VAE,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
