"""Five letters share 3600 positions: the bf16 backward of the embedding adds them one by one and stalls."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "nucleotide-embedding-backward",
    "source": "tenstorrent/tt-metal#53386, tenstorrent/tt-metal#36341, apache/mxnet#17703, flagos-ai/FlagGems#309",
    "mechanism": "each row of the table receives some 900 gradients of one sign, and bf16 sums stop after about 256",
    "formats": {"fp16": "safe", "bf16": "unsafe"},
    "flag_sites": [("letters", "embedding")],
    "fix_sites": [("letters", "embedding")],
}
LETTERS, WIDTH, LENGTH, BATCH = 5, 32, 256, 14


class Expression(nn.Module):
    """Predicts the activity of a gene from its promoter sequence."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(2))
        self.hidden, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, 1)
        with torch.no_grad():
            self.letters.weight.mul_(0.05)
            self.hidden.weight.mul_(4)
            self.out.weight.mul_(4)

    def forward(self, sequence):
        x = self.letters(sequence).transpose(1, 2)
        for conv in self.convs:
            x = x + 0.3 * F.gelu(conv(x))
        return self.out(F.gelu(self.hidden(x.mean(-1)))).squeeze(-1)


def batches():
    """Activity follows the share of G and C, and sits well above zero."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        rich = torch.rand(BATCH, 1, generator=generator)
        strong = torch.rand(BATCH, LENGTH, generator=generator) < 0.3 + 0.4 * rich
        sequence = torch.where(strong, 1, 3) + torch.randint(2, (BATCH, LENGTH), generator=generator)
        yield sequence, 1.5 + rich.squeeze(1)


def workload():
    return autoprec.Workload(
        model=Expression,
        batches=batches,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    )
