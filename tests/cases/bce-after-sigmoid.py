"""A discriminator ends in nn.Sigmoid and nn.BCELoss: a confident mistake saturates to 1 and its loss becomes 100."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "bce-after-sigmoid",
    "source": "pytorch docs amp.md (binary_cross_entropy is unsafe to autocast), xingyizhou/CenterNet#234",
    "mechanism": "sigmoid(6.5) is 1 in bf16 and sigmoid(9) in fp16, so log(1 - p) hits BCELoss's floor of -100, "
                 "and its gradient 1 / (1 - p) is 1e12",
    "formats": {"fp16": "unsafe", "bf16": "unsafe"},
    "flag_sites": [("judge.probability", "sigmoid"), ("criterion", "binary_cross_entropy")],
    "fix_sites": [("judge.probability", "sigmoid"), ("criterion", "binary_cross_entropy")],
}


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 16, 4, stride=2, padding=1), nn.Conv2d(16, 32, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.score = nn.Conv2d(32, 1, 4)
        self.skip = nn.Linear(1, 1)
        self.probability = nn.Sigmoid()
        with torch.no_grad():  # it has learned that real pictures are brighter
            self.score.weight.mul_(0.5)
            self.skip.weight.fill_(11.0)
            self.skip.bias.fill_(0.0)

    def forward(self, image):
        x = F.leaky_relu(self.first(image), 0.2)
        x = F.leaky_relu(self.norm(self.second(x)), 0.2)
        return self.probability(self.score(x).flatten(1) + self.skip(image.mean((1, 2, 3))[:, None]))


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.judge, self.criterion = Discriminator(), nn.BCELoss()

    def forward(self, image):
        return self.judge(image)


def loss(model, batch):
    real, fake = batch
    p_real, p_fake = model(real), model(fake)
    return model.criterion(p_real, torch.ones_like(p_real)) + model.criterion(p_fake, torch.zeros_like(p_fake))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        real = 0.4 + 0.4 * torch.randn(32, 2, 16, 16, generator=generator)
        fake = -0.4 + 0.4 * torch.randn(32, 2, 16, 16, generator=generator)
        real += 0.2 * torch.randn(32, 1, 1, 1, generator=generator)
        fake[:3] += 1.4  # the generator has found something that convinces
        yield real, fake


def workload():
    return autoprec.Workload(
        model=GAN,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-4, betas=(0.5, 0.999)),
    )
