"""Clipping squares and sums fp16 gradients by hand: the norm is inf, the factor 0, and nothing is ever learned."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "clip-norm-half",
    "source": "facebookresearch/fairscale#263, tracel-ai/burn#5699, facebookresearch/pytext#1514, NVIDIA-NeMo/Automodel#825",
    "mechanism": "one gradient of 300 has a square of 9e4, inf in fp16; max_norm / inf is 0, not 1 / 400",
    "kind": "gradients",
    "expect": "take the norm of fp16 gradients in fp32; the gradients themselves are fine",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}


class ClippedSGD(torch.optim.SGD):
    """SGD that first scales all gradients to a joint norm of at most 1."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.sqrt(sum((g * g).sum() for g in gradients))
        for g in gradients:
            g.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        return super().step(closure)


class PriceModel(nn.Module):
    """Apartment price in thousands from twelve normalised features."""

    def __init__(self, width=32):
        super().__init__()
        self.inward, self.norm = nn.Linear(12, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inward(x)
        return self.out(x + self.down(F.gelu(self.up(self.norm(x))))).squeeze(-1)


def batches():
    generator = torch.Generator().manual_seed(0)
    weight = 40 * torch.randn(12, generator=generator)
    for _ in range(8):
        x = torch.randn(64, 12, generator=generator)
        yield x, 250 + x @ weight


def loss(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def workload():
    return autoprec.Workload(
        model=PriceModel,
        batches=batches,
        loss=loss,
        optimizer=lambda params: ClippedSGD(params, lr=0.1),
    )


def train(dtype):
    """Largest first gradient, whether any weight moved, last loss over first."""
    torch.manual_seed(0)
    model = PriceModel().to(dtype)
    optimizer, start = workload().optimizer(model.parameters()), [p.detach().clone() for p in model.parameters()]
    losses, largest = [], None
    for batch in list(batches()) * 6:
        optimizer.zero_grad()
        value = loss(lambda x: model(x.to(dtype)), batch)
        value.backward()
        largest = largest or max(p.grad.abs().max().item() for p in model.parameters())
        optimizer.step()
        losses.append(value.item())
    moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    return largest, moved, losses[-1] / losses[0]


def verify():
    largest, moved, _ = train(torch.float16)
    _, fp32_moved, ratio = train(torch.float32)
    _, bf16_moved, bf16_ratio = train(torch.bfloat16)
    return {
        "fp16: every gradient is finite, the largest over 256": 256 < largest < 65504,
        "fp16: no weight ever moves": not moved,
        "fp32: learns": fp32_moved and ratio < 0.85,
        "bf16: learns": bf16_moved and bf16_ratio < 0.85,
    }
