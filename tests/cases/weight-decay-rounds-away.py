"""AdamW on bf16 weights multiplies by 1 - lr * decay = 0.9999, which bf16 rounds back: training without any decay."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "weight-decay-rounds-away",
    "source": "Nerogar/OneTrainer#996, pytorch/pytorch#120376, zyushun/Adam-mini#26",
    "mechanism": "1 - 1e-4 times a bf16 weight is nearer to that weight than to its neighbour, 4e-3 away",
    "kind": "params",
    "expect": "fp32 master weights, since lr * weight_decay is far below 2**-9",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}
RATE, DECAY = 5e-4, 0.2


class Tagger(nn.Module):
    """Tags words from the two on either side."""

    def __init__(self, words=120, width=32, tags=6):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Conv1d(width, width, 5, padding=2)
        self.norm, self.hidden, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, tags)

    def forward(self, words):
        x = self.embed(words)
        x = self.norm(x + F.gelu(self.mix(x.transpose(1, 2))).transpose(1, 2))
        return self.out(F.gelu(self.hidden(x)))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        words = torch.randint(120, (8, 20), generator=generator)
        yield words, (words + words.roll(1, 1)) % 6


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def workload():
    return autoprec.Workload(
        model=Tagger,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY),
    )


def trained(dtype, decay):
    torch.manual_seed(0)
    model = Tagger().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=decay)
    for batch in list(batches()) * 6:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            value = loss(model, batch)
        value.backward()
        optimizer.step()
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def verify():
    low, low_plain = trained(torch.bfloat16, DECAY), trained(torch.bfloat16, 0.0)
    master, master_plain = trained(torch.float32, DECAY), trained(torch.float32, 0.0)
    return {
        "bf16 weights: decay changes no weight at all": torch.equal(low, low_plain),
        "fp32 weights: decay shrinks them by a few thousandths": 0.002 < 1 - (master.norm() / master_plain.norm()).item() < 0.02,
    }
