"""A causal decoder adds the minimum of the dtype to future scores by hand; every row keeps its own position."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-additive-mask",
    "source": "own",
    "mechanism": "the mask follows the scores' dtype and no row is empty: -inf after rounding is as good as the minimum",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
VOCAB, WIDTH, HEADS, LENGTH = 50, 48, 4, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        mask = torch.full((LENGTH, LENGTH), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        return self.out((torch.softmax(scores + mask, dim=-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_in, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_mid, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm_in(x))
        return x + self.down(F.gelu(self.up(self.norm_mid(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight)))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        text = torch.randint(VOCAB, (8, LENGTH + 1), generator=generator)
        text[:, 1::2] = (text[:, :-1:2] * 3 + 1) % VOCAB
        yield text[:, :-1], text[:, 1:]


def workload():
    return autoprec.Workload(
        model=Decoder,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
