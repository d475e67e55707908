"""CLIP multiplies cosines by a learned 100: in bf16 a cosine of 0.7 is known to 0.002, a logit of 70 to 0.25."""
import math

import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "clip-scale-hundred",
    "source": "mlfoundations/open_clip#1002, openai/CLIP#530, openai/CLIP#30",
    "mechanism": "collapsed embeddings have cosines of 0.5 to 1, which bf16 knows to 0.002; a logit is off by 0.25 and more",
    "formats": {"fp16": "safe", "bf16": "unsafe"},
    "tolerance": {"fp16": 0.05, "bf16": 0.1},
    "flag_sites": [("contrast", "div"), ("contrast", "matmul"), ("contrast", "mul")],
    "fix_sites": [("contrast", "*"), ("@loss", "cross_entropy")],
}
WIDTH, BATCH = 48, 64


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(100.0)))

    def forward(self, image, text):
        image = image / image.norm(dim=-1, keepdim=True)
        text = text / text.norm(dim=-1, keepdim=True)
        return self.logit_scale.exp() * (image @ text.t())


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.inward, self.norm = nn.Linear(inputs, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, 32)

    def forward(self, x):
        x = self.inward(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.project(x)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.contrast = Tower(24), Tower(16), Contrast()

    def forward(self, image, text):
        return self.contrast(self.image(image), self.text(text))


def loss(model, batch):
    logits, target = model(*batch), torch.arange(BATCH)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def views():
    """How a topic shows in an image and in a text."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(8, 24, generator=generator) / 3, torch.randn(8, 16, generator=generator) / 3


def model():
    """As trained: both towers read off the topic, inside the narrow cone that embeddings end up in."""
    net = CLIP()
    with torch.no_grad():
        for tower, view in zip((net.image, net.text), views(), strict=True):
            tower.inward.weight[:8] = torch.linalg.pinv(view).t()
            tower.inward.bias[:8] = 0
            tower.down.weight.mul_(0.1)
            tower.project.weight.zero_()
            tower.project.weight[:8, :8] = torch.eye(8)
            tower.project.bias.fill_(1.0)
    return net


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        topic = torch.randn(BATCH, 8, generator=generator)
        yield tuple(topic @ v + 0.15 * torch.randn(BATCH, v.shape[1], generator=generator) for v in views())


def workload():
    return autoprec.Workload(
        model=model,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-4),
    )
