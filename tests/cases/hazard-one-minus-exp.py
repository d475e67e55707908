"""A survival model takes log(1 - exp(-rate)); for rates of 1e-4 the difference is 0 or one rounding step."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hazard-one-minus-exp",
    "source": "own, the textbook case for expm1; lucidrains/DALLE2-pytorch#138 and pytorch/pytorch#187053 for log of an "
              "underflowed term",
    "mechanism": "exp(-1e-4) is 1 in both formats, so an event in a low-risk month has probability 0 and log -inf",
    "formats": {"fp16": "unsafe", "bf16": "unsafe"},
    "flag_sites": [("likelihood", "exp"), ("likelihood", "sub", 0)],
    "fix_sites": [("likelihood", "neg", 0), ("likelihood", "exp"), ("likelihood", "sub", 0), ("likelihood", "log")],
}
MONTHS, FEATURES, WIDTH = 24, 10, 48


class DiscreteHazard(nn.Module):
    """Negative log-likelihood of failing within month t, or of surviving it."""

    def forward(self, rate, failed, at_risk):
        failing = torch.log(1.0 - torch.exp(-rate))
        per_month = torch.where(failed, failing, -rate)
        return -(per_month * at_risk).sum() / at_risk.sum()


class HazardNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.month = nn.Parameter(torch.zeros(MONTHS, WIDTH))
        self.out = nn.Linear(WIDTH, 1)
        self.likelihood = DiscreteHazard()
        with torch.no_grad():
            self.out.bias.fill_(-7.5)  # drives fail rarely: 5e-4 a month
            self.out.weight.mul_(2)

    def forward(self, x):
        x = self.inward(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.softplus(self.out(F.gelu(x[:, None] + self.month)).squeeze(-1)) + 1e-5


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        x = torch.randn(256, FEATURES, generator=generator)
        hazard = torch.exp(-4.5 + x[:, :1] + 0.02 * torch.arange(MONTHS))
        event = torch.rand(256, MONTHS, generator=generator) < hazard
        before = event.int().cumsum(1) - event.int()
        yield x, event & (before == 0), (before == 0).float()


def workload():
    return autoprec.Workload(
        model=HazardNet,
        batches=batches,
        loss=lambda model, batch: model.likelihood(model(batch[0]), batch[1], batch[2]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
