"""SwAV-style assignments start from exp(score / 0.05), which fp16 cannot hold for a prototype that fits well."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "swav-sinkhorn",
    "source": "facebookresearch/swav#67",
    "mechanism": "a cosine of 0.7 gives exp(14) = 1.2e6, inf in fp16; inf / inf makes the targets NaN",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("assign", "exp"), ("assign", "sum", 0)],
    "fix_sites": [("assign", "exp"), ("assign", "sum"), ("assign", "div")],
}
PROTOTYPES, WIDTH, BATCH = 24, 48, 96


class Assign(nn.Module):
    """Three Sinkhorn-Knopp rounds: every prototype gets its share of the batch."""

    @torch.no_grad()
    def forward(self, scores):
        q = torch.exp(scores / 0.05).t()
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(dim=1, keepdim=True)
            q /= PROTOTYPES
            q /= q.sum(dim=0, keepdim=True)
            q /= scores.shape[0]
        return (q * scores.shape[0]).t()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, 32, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(4, 32)
        self.deep = nn.Conv1d(32, WIDTH, 5, stride=2, padding=2)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
        self.prototypes = nn.Linear(16, PROTOTYPES, bias=False)
        self.assign = Assign()
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(torch.randn(PROTOTYPES, 16), dim=-1))

    def forward(self, signal):
        x = F.relu(self.norm(self.stem(signal)))
        z = F.normalize(self.head(F.relu(self.deep(x)).mean(-1)), dim=-1)
        return self.prototypes(z)


def loss(model, batch):
    scores = [model(view) for view in batch]
    total = 0.0
    for this, other in ((0, 1), (1, 0)):
        total = total - (model.assign(scores[other]) * F.log_softmax(scores[this] / 0.1, dim=-1)).sum(-1).mean()
    return total / 2


def batches():
    generator = torch.Generator().manual_seed(0)
    time = torch.linspace(0, 6.28, 48)
    for _ in range(8):
        kind = torch.randint(1, 7, (BATCH, 1, 1), generator=generator)
        phase = 6.28 * torch.rand(BATCH, 2, 1, generator=generator)
        clean = torch.sin(kind * time + phase)
        yield tuple(clean + 0.3 * torch.randn(BATCH, 2, 48, generator=generator) for _ in range(2))


def workload():
    return autoprec.Workload(
        model=Encoder,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
