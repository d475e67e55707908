"""A Cox model takes logcumsumexp over 64 patients sorted by survival time."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-cox-logcumsumexp",
    "source": "own",
    "mechanism": "the running log-sum stays under 8, where both formats still resolve what separates patients",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
class Risk(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.norm = nn.Linear(14, 48), nn.LayerNorm(48)
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        x = self.inward(x)
        return self.out(x + self.down(F.gelu(self.up(self.norm(x))))).squeeze(-1)


def partial_likelihood(model, batch):
    """Patients come sorted from longest to shortest time, so that the risk set is everyone before."""
    x, died = batch
    risk = model(x)
    return -((risk - torch.logcumsumexp(risk, dim=0)) * died).sum() / died.sum()


def batches():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(14, generator=generator) / 2
    for _ in range(8):
        x = torch.randn(64, 14, generator=generator)
        time = -torch.log(torch.rand(64, generator=generator)) * torch.exp(-(x @ weight))
        order = time.argsort(descending=True)
        yield x[order], (torch.rand(64, generator=generator) < 0.7).float()


def workload():
    return autoprec.Workload(
        model=Risk,
        batches=batches,
        loss=partial_likelihood,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
