"""A patient-record encoder subtracts event times in hours since 2020: the gaps drown in the rounding of the times."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "event-time-gap",
    "source": "modelscope/DiffSynth-Studio#562, RosettaCommons/foundry#236, HabanaAI/vllm-fork#503",
    "mechanism": "at 40000 hours fp16 steps by 32 and bf16 by 256, and events of one stay are hours apart",
    "formats": {"fp16": "unsafe", "bf16": "unsafe"},
    "flag_sites": [("time_gap", "sub")],
    "fix_sites": [("time_gap", "sub")],
}
CODES, WIDTH, HEADS, LENGTH, DEPTH = 60, 48, 4, 40, 6


class TimeGap(nn.Module):
    """Bias per head that falls with the logarithm of the time between two events."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.2, 0.6, 1.2, 2.0])[:, None, None])

    def forward(self, hours):
        gap = torch.sub(hours[:, None, :, None], hours[:, None, None, :])
        return -self.slope * torch.log1p(gap.abs())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_in, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_mid, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        with torch.no_grad():
            self.out.weight.mul_(3)
            self.qkv.weight[2 * WIDTH:].mul_(2)

    def forward(self, x, bias):
        q, k, v = self.qkv(self.norm_in(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5 + bias
        x = x + self.out(torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mid(x))))


class Record(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.time_gap = nn.Embedding(CODES, WIDTH), TimeGap()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CODES)

    def forward(self, codes, hours):
        x, bias = self.code(codes), self.time_gap(hours)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x))


def batches():
    """The code to recover at each event is that of the nearest other event."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        codes = torch.randint(CODES, (6, LENGTH), generator=generator)
        first = 35000 + 8000 * torch.rand(6, 1, generator=generator)
        hours = first + (8 * torch.rand(6, LENGTH, generator=generator) ** 3).cumsum(1)
        apart = (hours[:, :, None] - hours[:, None]).abs() + 1e6 * torch.eye(LENGTH)
        yield codes, hours, codes.gather(1, apart.argmin(-1))


def workload():
    return autoprec.Workload(
        model=Record,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0], batch[1]).transpose(1, 2), batch[2]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
