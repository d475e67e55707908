"""A state-space-duality layer takes exp(L_i - L_j) of a running sum of log-decays; bf16 rounds the running sum."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "ssd-segment-decay",
    "source": "inclusionAI/cuLA#89, state-spaces/mamba#923, fla-org/flash-linear-attention#867",
    "mechanism": "the sum reaches -130, where bf16 steps by 1 and fp16 by 1/8, while neighbours differ by 0.5",
    "formats": {"fp16": "safe", "bf16": "unsafe"},
    "tolerance": {"fp16": 0.05, "bf16": 0.1},
    "flag_sites": [("layers.*.mixer.decay", "cumsum"), ("layers.*.mixer.decay", "sub")],
    "fix_sites": [("layers.*.mixer.decay", "cumsum"), ("layers.*.mixer.decay", "sub")],
}
VOCAB, WIDTH, HEADS, LENGTH = 40, 48, 4, 256


class SegmentDecay(nn.Module):
    """Decay from step j to step i, for every pair with j <= i."""

    def forward(self, log_decay):
        total = log_decay.cumsum(dim=-1)
        gap = total[..., :, None] - total[..., None, :]
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return gap.masked_fill(future, -torch.inf).exp()


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.rate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)
        self.decay = SegmentDecay()
        with torch.no_grad():
            self.rate.weight.mul_(0.3)
            self.qkv.weight[:2 * WIDTH].mul_(1.5)
            self.out.weight.mul_(5)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        log_decay = -0.72 * F.softplus(self.rate(x)).transpose(1, 2)
        score = torch.einsum("bhid,bhjd->bhij", q, k) * self.decay(log_decay)
        return self.out(torch.einsum("bhij,bhjd->bhid", score, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(WIDTH), Mixer()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x):
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.down(F.silu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batches():
    """Repeat the token of three steps ago."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        yield tokens, tokens.roll(3, dims=1)


def workload():
    return autoprec.Workload(
        model=LanguageModel,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0])[:, 3:].flatten(0, 1), batch[1][:, 3:].flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
