"""A graph convolution counts links by index_add to weigh them by 1 / sqrt(degree): bf16 stops counting at 256."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "gcn-hub-degree",
    "source": "tenstorrent/tt-metal#33577, pytorch/pytorch#124783, flagos-ai/FlagGems#4295",
    "mechanism": "256 + 1 is 256 in bf16; hubs have 800 to 1500 links, which fp16 still counts exactly",
    "formats": {"fp16": "safe", "bf16": "unsafe"},
    "flag_sites": [("normalise", "index_add")],
    "fix_sites": [("normalise", "index_add"), ("normalise", "add"), ("normalise", "pow")],
}
NODES, HUBS, LINKS, WIDTH = 120, 6, 7000, 32


class Normalise(nn.Module):
    """D^-1/2 of the graph with self-loops."""

    def forward(self, target):
        degree = torch.zeros(NODES).index_add(0, target, torch.ones(len(target))) + 1.0
        return degree.pow(-0.5)[:, None]


class GraphConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, source, target, scale):
        sent = scale * self.message(x)
        return scale * (sent + torch.zeros(NODES, WIDTH).index_add(0, target, sent[source]))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.normalise = Normalise()
        self.layers = nn.ModuleList([GraphConv(), GraphConv()])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x, source, target):
        x, scale = self.embed(x), self.normalise(target)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.relu(layer(norm(x), source, target, scale))
        return self.out(x[:HUBS]).squeeze(-1)


def batches():
    """Follow graph of a platform; the task is about the six big accounts."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        x = 0.5 + torch.randn(NODES, 8, generator=generator)
        source = torch.randint(NODES, (LINKS,), generator=generator)
        target = torch.randint(NODES, (LINKS,), generator=generator)
        target[:6000] = torch.randint(HUBS, (6000,), generator=generator)
        mean = torch.stack([x[source[target == hub], 0].mean() for hub in range(HUBS)])
        yield x, source, target, 2 * mean + x[:HUBS, 1]


def workload():
    return autoprec.Workload(
        model=GraphNet,
        batches=batches,
        loss=lambda model, batch: F.smooth_l1_loss(model(*batch[:3]), batch[3]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
