"""ArcFace clamps the cosine to 1 - 1e-7 before acos; that bound is 1 in half precision, where acos has no slope."""
import math

import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "arcface-acos-clamp",
    "source": "sirius-ai/MobileFaceNet_TF#4, open-mmlab/mmpretrain#926, THUFutureLab/gluon-face#38",
    "mechanism": "a face next to its class centre has a cosine that rounds to 1; the slope of acos there is -inf",
    "formats": {"fp16": "unsafe", "bf16": "unsafe"},
    "flag_sites": [("margin", "clamp"), ("margin", "acos")],
    "fix_sites": [("margin", "*")],
}
PEOPLE, WIDTH = 20, 32


class ArcMargin(nn.Module):
    """Scaled cosines, with an angle of 0.3 added for the true person."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(PEOPLE, WIDTH))

    def forward(self, features, person):
        cosine = F.linear(F.normalize(features), F.normalize(self.centres)).clamp(-1 + 1e-7, 1 - 1e-7)
        angle = torch.acos(cosine)
        margin = 0.3 * F.one_hot(person, PEOPLE)
        return 16 * torch.cos(torch.clamp(angle + margin, max=math.pi))


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 12)
        self.embed = nn.Linear(24 * 9, WIDTH)
        self.margin = ArcMargin()

    def forward(self, images):
        x = F.relu(self.norm(self.stem(images)))
        return self.embed(F.relu(self.deep(x)).flatten(1))


def prototypes():
    return torch.randn(PEOPLE, 1, 12, 12, generator=torch.Generator().manual_seed(7))


def model():
    """As trained: the class centres sit where the network sends the prototypes."""
    net = FaceNet()
    with torch.no_grad():
        net.margin.centres.copy_(net(prototypes()))
    return net


def batches():
    generator, faces = torch.Generator().manual_seed(0), prototypes()
    for _ in range(8):
        person = torch.randint(PEOPLE, (48,), generator=generator)
        noise = torch.randn(48, 1, 12, 12, generator=generator) * torch.rand(48, 1, 1, 1, generator=generator)
        noise[:6] *= 0.02  # passport photographs
        yield faces[person] + 0.4 * noise, person


def workload():
    return autoprec.Workload(
        model=model,
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model.margin(model(batch[0]), batch[1]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    )
