"""Rotary attention over 400 positions whose cosines and sines were tabulated in fp32 beforehand."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-rope-tables",
    "source": "own",
    "mechanism": "only the finished cosines are rounded, by 4e-3 at most; no phase is ever computed in low precision",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
VOCAB, WIDTH, HEADS, LENGTH = 40, 48, 3, 400


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        half = WIDTH // HEADS // 2
        phase = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", phase.cos())
        self.register_buffer("sin", phase.sin())

    def rotate(self, x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.norm_mid, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.norm_out, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        x = x + self.down(F.gelu(self.up(self.norm_mid(x))))
        return self.head(self.norm_out(x))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        yield tokens, tokens.roll(1, dims=1)


def workload():
    return autoprec.Workload(
        model=Reader,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0])[:, 1:].flatten(0, 1), batch[1][:, 1:].flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
