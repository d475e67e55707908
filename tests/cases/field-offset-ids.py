"""A recommender adds a field offset to float category codes: beyond 256 bf16 rounds codes onto their neighbours."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "field-offset-ids",
    "source": "RosettaCommons/foundry#236, THUFutureLab/gluon-face#28",
    "mechanism": "codes plus offsets reach 1900; bf16 knows every eighth of those, fp16 all up to 2048",
    "formats": {"fp16": "safe", "bf16": "unsafe"},
    "flag_sites": [("encode", "add")],
    "fix_sites": [("encode", "add")],
}
SIZES, WIDTH = (500, 800, 600), 16


class Encode(nn.Module):
    """One table for all categorical fields; the data loader delivers every column as a float."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(sum(SIZES) + 16, WIDTH)
        self.register_buffer("offset", torch.tensor([0.0, SIZES[0], SIZES[0] + SIZES[1]]))

    def forward(self, codes):
        return self.table((codes + self.offset).long())


class FactorisationNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = Encode()
        self.dense = nn.Linear(5, WIDTH)
        self.norm = nn.LayerNorm(4 * WIDTH)
        self.hidden = nn.ModuleList([nn.Linear(4 * WIDTH, 64), nn.Linear(64, 32)])
        self.out = nn.Linear(32, 1)

    def forward(self, codes, numbers):
        fields = torch.cat([self.encode(codes), self.dense(numbers)[:, None]], dim=1)
        crossed = (fields.sum(1).square() - fields.square().sum(1)).sum(-1) / WIDTH
        x = self.norm(fields.flatten(1))
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.out(x).squeeze(-1) + 0.1 * crossed


def batches():
    generator = torch.Generator().manual_seed(0)
    taste = [torch.randn(size, generator=generator) for size in SIZES]
    for _ in range(8):
        codes = torch.stack([torch.randint(size, (256,), generator=generator) for size in SIZES], dim=1)
        numbers = torch.randn(256, 5, generator=generator)
        logit = sum(t[codes[:, i]] for i, t in enumerate(taste)) + numbers[:, 0]
        yield codes.float(), numbers, (logit > 0).float()


def workload():
    return autoprec.Workload(
        model=FactorisationNet,
        batches=batches,
        loss=lambda model, batch: F.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2]),
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.05),
    )
