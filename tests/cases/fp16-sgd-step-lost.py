"""Fine-tuning fp16 weights by SGD with a small rate: lr * gradient is under half a spacing of the weight, or under 6e-8."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "fp16-sgd-step-lost",
    "source": "pytorch/pytorch#120376, meta-pytorch/torchtune#2254, workofart/ml-by-hand#85",
    "mechanism": "a step of 1e-4 * 0.02 = 2e-6 on a weight of 0.1, where fp16 numbers are 6e-5 apart, rounds away",
    "kind": "params",
    "expect": "fp32 master weights for all matrices; fp16 is fine for the computation",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}


class Classifier(nn.Module):
    """Pretrained vision features to new classes."""

    def __init__(self, width=48):
        super().__init__()
        self.inward, self.norm = nn.Linear(32, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        x = self.inward(x)
        return self.out(self.norm(x + self.down(F.gelu(self.up(x)))))


def batches():
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(5, 32, generator=generator)
    for _ in range(8):
        label = torch.randint(5, (64,), generator=generator)
        yield centre[label] + torch.randn(64, 32, generator=generator), label


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def workload():
    return autoprec.Workload(
        model=Classifier,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
    )


def trained(weight_dtype, scale=1024.0, steps=100):
    """Share of matrix entries that moved and the loss gained, with gradients scaled and unscaled as usual."""
    torch.manual_seed(0)
    model = Classifier().to(weight_dtype)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    start = [p.detach().clone() for p in matrices]
    optimizer, data = workload().optimizer(model.parameters()), list(batches())
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=weight_dtype == torch.float32):
            value = loss(lambda x: model(x.to(weight_dtype)), data[step % len(data)])
        (value * scale).backward()
        for p in model.parameters():
            p.grad.div_(scale)
        optimizer.step()
    moved = torch.cat([(p != q).float().flatten() for p, q in zip(matrices, start, strict=True)]).mean().item()
    torch.manual_seed(0)
    return moved, loss(Classifier(), data[0]).item() - loss(model.float(), data[0]).item()


def verify():
    low_moved, low_gain = trained(torch.float16)
    moved, gain = trained(torch.float32)
    return {
        "fp16 weights: at most a fifth of the entries ever move": low_moved < 0.2,
        "fp32 weights under fp16 autocast: nearly all move": moved > 0.95,
        "fp32 weights: the loss falls": gain > 0.005,
        "fp16 weights: it falls by at most two thirds as much": low_gain < 0.67 * gain,
    }
