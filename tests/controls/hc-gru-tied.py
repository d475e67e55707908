"""A GRU language model whose output layer is its embedding table."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-gru-tied",
    "source": "own",
    "mechanism": "gates are bounded, the state is an average, and a shared table of small weights is ordinary",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
VOCAB, WIDTH, LENGTH = 64, 48, 40


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.recur = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.15)

    def forward(self, tokens):
        states, _ = self.recur(self.embed(tokens).to(self.recur.weight_ih_l0.dtype))
        return F.linear(torch.tanh(self.mix(self.norm(states))), self.embed.weight)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        start = torch.randint(VOCAB, (12, 1), generator=generator)
        stride = torch.randint(1, 4, (12, 1), generator=generator)
        text = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
        yield text[:, :-1], text[:, 1:]


def workload():
    return autoprec.Workload(
        model=Tied,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    )
