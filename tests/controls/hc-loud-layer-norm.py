"""Features of several thousand go into a fused layer norm, and logits spread over 60 units into log_softmax."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-loud-layer-norm",
    "source": "own",
    "mechanism": "fused kernels take moments and the log-sum in fp32; 3000 fits fp16",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
WIDTH, CLASSES = 48, 10


class LoudNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.norm = nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.out_norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.inward.weight.mul_(2500)
            self.head.weight.mul_(15)

    def forward(self, x):
        x = self.norm(self.inward(x))
        x = x + self.down(F.gelu(self.up(x)))
        return F.log_softmax(self.head(self.out_norm(x)), dim=-1)


def batches():
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(CLASSES, 16, generator=generator)
    for _ in range(8):
        label = torch.randint(CLASSES, (64,), generator=generator)
        yield centre[label] + 0.5 * torch.randn(64, 16, generator=generator), label


def workload():
    return autoprec.Workload(
        model=LoudNet,
        batches=batches,
        loss=lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
