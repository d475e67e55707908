"""Sinkhorn matching in log space: exp only meets numbers below zero."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-sinkhorn-log",
    "source": "own",
    "mechanism": "logsumexp never leaves the range of its inputs, and a temperature of 0.3 keeps those under 10",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
class Matcher(nn.Module):
    """Matches two shuffled sets of points by their local descriptors."""

    def __init__(self):
        super().__init__()
        self.inward, self.norm = nn.Linear(6, 48), nn.LayerNorm(48)
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.out = nn.Linear(48, 16)

    def describe(self, x):
        x = self.inward(x)
        return F.normalize(self.out(x + self.down(F.gelu(self.up(self.norm(x))))), dim=-1, eps=1e-3)

    def forward(self, first, second):
        plan = torch.bmm(self.describe(first), self.describe(second).transpose(1, 2)) / 0.3
        for _ in range(4):
            plan = plan - torch.logsumexp(plan, dim=2, keepdim=True)
            plan = plan - torch.logsumexp(plan, dim=1, keepdim=True)
        return plan


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        first = torch.randn(6, 16, 6, generator=generator)
        order = torch.stack([torch.randperm(16, generator=generator) for _ in range(6)])
        second = first.gather(1, order[..., None].expand(-1, -1, 6)) + 0.2 * torch.randn(6, 16, 6, generator=generator)
        yield first, second, order


def workload():
    return autoprec.Workload(
        model=Matcher,
        batches=batches,
        loss=lambda model, batch: F.nll_loss(model(batch[0], batch[1]), batch[2]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
