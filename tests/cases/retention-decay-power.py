"""RetNet raises decays just below one to the distance of two tokens: bf16 turns 0.9986 into 1 and 0.9945 into 0.996."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "retention-decay-power",
    "source": "state-spaces/mamba#923, inclusionAI/cuLA#89, RoyChao19477/SEMamba#20",
    "mechanism": "the base is rounded to steps of 3.9e-3 in bf16 before a power of up to 255; fp16 steps by 4.9e-4",
    "formats": {"fp16": "safe", "bf16": "unsafe"},
    "tolerance": {"fp16": 0.05, "bf16": 0.1},
    "flag_sites": [("decay", "pow")],
    "fix_sites": [("decay", "pow")],
}
VOCAB, WIDTH, HEADS, LENGTH, CLASSES = 30, 48, 4, 256, 5


class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("gamma", torch.tensor([0.9823, 0.9903, 0.9942, 0.9984])[:, None, None])

    def forward(self, length):
        step = torch.arange(length, dtype=torch.float32)
        distance = (step[:, None] - step).clamp(min=0)
        return torch.pow(self.gamma, distance).tril()


class Retention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.g, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.GroupNorm(HEADS, WIDTH, affine=False)

    def forward(self, x, decay):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(-1, -2) * decay * 0.05) @ v
        mixed = self.norm(mixed.transpose(1, 2).flatten(2).transpose(1, 2)).transpose(1, 2)
        return self.out(F.silu(self.g(x)) * mixed)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.retention_norm, self.retention = nn.LayerNorm(WIDTH), Retention()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x, decay):
        x = x + self.retention(self.retention_norm(x), decay)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class RetNet(nn.Module):
    """Reads a log and names its most common kind of entry."""

    def __init__(self):
        super().__init__()
        self.embed, self.decay = nn.Embedding(VOCAB, WIDTH), Decay()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            for layer in self.layers:
                layer.retention.q.bias.fill_(1.0)
                layer.retention.k.bias.fill_(1.0)
                layer.retention.v.bias.fill_(0.5)
                layer.retention.out.weight.mul_(5)

    def forward(self, tokens):
        x, decay = self.embed(tokens), self.decay(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, decay)
        return self.head(self.norm(x[:, -1]))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        label = torch.randint(CLASSES, (4,), generator=generator)
        typical = label[:, None] * 6 + torch.randint(6, (4, LENGTH), generator=generator)
        other = torch.randint(VOCAB, (4, LENGTH), generator=generator)
        yield torch.where(torch.rand(4, LENGTH, generator=generator) < 0.3, typical, other), label


def workload():
    return autoprec.Workload(
        model=RetNet,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
