"""-log(p + 1e-6) is finite in fp16 even for a mislabelled sample; its gradient, 1 / p, is not."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "nll-of-probability-backward",
    "source": "pytorch/pytorch#187053, tdrussell/qlora-pipe#23, HobbitLong/SupContrast#104",
    "mechanism": "forward every value fits; backward 1024 / 64 / 3e-6 = 5e6 passes 65504 before softmax scales it by p",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("likelihood", "log"), ("likelihood", "add"), ("likelihood", "gather"),
                   ("likelihood", "softmax")],
    "fix_sites": [("likelihood", "softmax"), ("likelihood", "gather"), ("likelihood", "add"), ("likelihood", "log")],
}
CLASSES, WIDTH = 6, 48


class Likelihood(nn.Module):
    def forward(self, logits, label):
        p = logits.softmax(dim=-1).gather(-1, label[:, None])
        return -(p + 1e-6).log().mean()


class Net(nn.Module):
    """Keyword spotter after training on clean data."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, 32, 5, padding=2), nn.Conv1d(32, WIDTH, 5, stride=2, padding=2)
        self.norm1, self.norm2 = nn.GroupNorm(4, 32), nn.GroupNorm(4, WIDTH)
        self.skip, self.head = nn.Linear(8, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.likelihood = Likelihood()
        with torch.no_grad():
            self.skip.weight.copy_(7 * torch.eye(CLASSES, 8))

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h))).mean(-1)
        return self.head(h) + self.skip(x.mean(-1))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        label = torch.randint(CLASSES, (64,), generator=generator)
        x = 1.8 * F.one_hot(label, 8)[..., None] + 0.8 * torch.randn(64, 8, 24, generator=generator)
        label[:4] = (label[:4] + 1) % CLASSES  # labelled wrongly
        yield x, label


def workload():
    return autoprec.Workload(
        model=Net,
        batches=batches,
        loss=lambda model, batch: model.likelihood(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
