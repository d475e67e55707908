"""A linear-chain CRF sums log-potentials over 160 steps; the partition function loses what separates it from the path."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "crf-forward-recursion",
    "source": "allenai/allennlp#4478, allanj/pytorch_neural_crf#4, tinygrad/tinygrad#15514",
    "mechanism": "alpha grows into the hundreds, where bf16 steps by 4 and fp16 by 0.5 while tags differ by about one; "
                 "the posteriors exp(alpha - sum) compound it over the steps",
    "formats": {"fp16": "unsafe", "bf16": "unsafe"},
    "flag_sites": [("crf.partition", "add"), ("crf.partition", "logsumexp")],
    "fix_sites": [("crf.partition", "*"), ("crf", "sub")],
}
FEATURES, WIDTH, TAGS, LENGTH = 16, 48, 7, 160


class Partition(nn.Module):
    """Log of the summed score of all tag sequences."""

    def forward(self, emission, transition):
        alpha = emission[:, 0]
        for t in range(1, emission.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + transition, dim=1) + emission[:, t]
        return torch.logsumexp(alpha, dim=1)


class CRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.transition = nn.Parameter(torch.eye(TAGS) * 1.5)
        self.partition = Partition()

    def forward(self, emission, tags):
        unary = emission.gather(2, tags[..., None]).squeeze(-1).mean(1)
        binary = self.transition[tags[:, :-1], tags[:, 1:]].mean(1)
        return (self.partition(emission, self.transition) / LENGTH - (unary + binary)).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Conv1d(FEATURES, WIDTH, 5, padding=2)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.emit = nn.Linear(WIDTH, TAGS)
        self.crf = CRF()
        with torch.no_grad():
            self.emit.bias.fill_(2.0)

    def forward(self, x):
        x = F.gelu(self.norm(self.inward(x.transpose(1, 2))))
        x = x + F.gelu(self.mix(x))
        return self.emit(x.transpose(1, 2))


def batches():
    generator = torch.Generator().manual_seed(0)
    code = torch.randn(TAGS, FEATURES, generator=generator)
    for _ in range(8):
        tags = torch.randint(TAGS, (8, LENGTH // 8), generator=generator).repeat_interleave(8, dim=1)
        yield code[tags] + 1.5 * torch.randn(8, LENGTH, FEATURES, generator=generator), tags


def workload():
    return autoprec.Workload(
        model=Tagger,
        batches=batches,
        loss=lambda model, batch: model.crf(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
