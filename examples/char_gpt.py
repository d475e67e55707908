"""A byte-level GPT that learns the language reference that ships with CPython.

autoprec tune examples/char_gpt.py --out policy.yaml
"""

from collections.abc import Iterator
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoprec

WIDTH, HEADS, DEPTH, CONTEXT, BATCH, EPOCH = 192, 4, 4, 64, 8, 200


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch of (text, the same text one byte later), the same windows every time."""
    book = torch.frombuffer(bytearray("\n".join(topics.topics.values()), "utf-8"), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCH):
        starts = torch.randint(len(book) - CONTEXT, (BATCH, 1), generator=generator)
        windows = book[starts + torch.arange(CONTEXT + 1)].long()
        yield windows[:, :-1], windows[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    text, next_bytes = batch
    return F.cross_entropy(model(text).flatten(0, 1), next_bytes.flatten())


def optimizer(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95))


def workload() -> autoprec.Workload:
    return autoprec.Workload(model=GPT, batches=batches, loss=loss, optimizer=optimizer)
