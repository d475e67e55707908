"""Four experts mixed by a softmax gate, with a balance term from the share of tokens each one wins."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-soft-experts",
    "source": "own",
    "mechanism": "all experts run, so a near tie changes nothing much, and counts of up to 96 tokens are exact",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
EXPERTS, WIDTH = 4, 32


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        share = self.gate(x).softmax(dim=-1)
        mixed = sum(share[:, i:i + 1] * expert(x) for i, expert in enumerate(self.experts))
        won = F.one_hot(share.argmax(-1), EXPERTS).to(share.dtype).sum(0) / len(x)
        return mixed, EXPERTS * (won * share.mean(0)).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.norm, self.mixture = nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH), Mixture()
        self.norm_out, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.inward(x)
        mixed, balance = self.mixture(self.norm(x))
        return self.out(self.norm_out(x + mixed)), balance


def loss(model, batch):
    made, balance = model(batch[0])
    return F.huber_loss(made, batch[1]) + 0.01 * balance


def batches():
    generator = torch.Generator().manual_seed(0)
    rules = torch.randn(EXPERTS, 10, 2, generator=generator)
    for _ in range(8):
        x = torch.randn(96, 10, generator=generator)
        rule = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0)
        yield x, torch.einsum("ni,nio->no", x, rules[rule]) / 3


def workload():
    return autoprec.Workload(
        model=Net,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    )
