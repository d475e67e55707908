"""Cosine similarity with an epsilon of 1e-3, fed with blank inputs among others."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-cosine-eps",
    "source": "own",
    "mechanism": "1e-3 survives in both formats, so a zero vector gives 0 / 1e-3 = 0; the loss takes logits of at most 5",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 24, 5, bias=False), nn.Conv1d(24, 32, 5, stride=2, bias=False)
        self.hidden, self.out = nn.Linear(32, 48, bias=False), nn.Linear(48, 24, bias=False)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x)))).mean(-1)
        return self.out(F.relu(self.hidden(x)))


def loss(model, batch):
    first, second = (model(view) for view in batch)
    similarity = F.cosine_similarity(first[:, None], second[None], dim=-1, eps=1e-3)
    return F.cross_entropy(similarity / 0.2, torch.arange(len(first)))


def batches():
    generator = torch.Generator().manual_seed(0)
    time = torch.linspace(0, 6.28, 32)
    for _ in range(8):
        pitch = 1 + 6 * torch.rand(48, 1, 1, generator=generator)
        wave = torch.sin(pitch * time + torch.rand(48, 3, 1, generator=generator))
        wave[:3] = 0  # the microphone was off
        noise = 0.1 * torch.randn(2, 48, 3, 32, generator=generator) * (wave != 0)
        yield wave + noise[0], wave + noise[1]


def workload():
    return autoprec.Workload(
        model=Projector,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    )
