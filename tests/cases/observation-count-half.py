"""A policy normalises observations by running moments with a count: in fp16 the count overflows, in bf16 it stalls."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "observation-count-half",
    "source": "HumanCompatibleAI/imitation#393, pytorch/pytorch#70901, deepspeedai/DeepSpeed#8496",
    "mechanism": "count += 32 passes 65504 after 2047 batches in fp16 (var * inf / inf is NaN) and stops at 8192 in bf16",
    "kind": "state",
    "expect": "keep the buffers normalise.count, mean and var in fp32",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}


class RunningMoments(nn.Module):
    """Moments of all observations so far, merged batch by batch."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    @torch.no_grad()
    def update(self, x):
        total = self.count + len(x)
        delta = x.mean(0) - self.mean
        within = self.var * self.count + x.var(0, correction=0) * len(x)
        self.var.copy_((within + delta.square() * self.count * len(x) / total) / total)
        self.mean.add_(delta * len(x) / total)
        self.count.copy_(total)

    def forward(self, x):
        if self.training:
            self.update(x)
        return (x - self.mean) / (self.var + 1e-4).sqrt()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalise = RunningMoments(8)
        self.first, self.second, self.out = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.second(torch.tanh(self.first(self.normalise(x))))))


def batches():
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 0.3, 1, 1, 2, 3, 5, 5])
    for _ in range(8):
        x = 1.5 + scale * torch.randn(32, 8, generator=generator)
        yield x, ((x - 1.5) / scale)[:, :3].argmax(-1)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def workload():
    return autoprec.Workload(
        model=Policy,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )


def count_after(dtype, steps=2100):
    moments, data = RunningMoments(8).to(dtype), [x.to(dtype) for x, _ in batches()]
    for step in range(steps):
        moments.update(data[step % len(data)])
    return moments.count.item(), moments.var.float(), moments.mean.float()


def verify():
    count, var, mean = count_after(torch.float32)
    half_count, half_var, _ = count_after(torch.float16)
    low_count, _, _ = count_after(torch.bfloat16)
    return {
        "fp32: counts them all, moments are right": count == 67200 and var.isfinite().all().item() and (mean - 1.5).abs().max().item() < 1,
        "fp16: the count is inf and the variance NaN": half_count == float("inf") and half_var.isnan().all().item(),
        "bf16: the count stands at 8192": low_count == 8192,
    }
