"""A style loss divides features by the root of the pixel count before their Gram matrix, not after."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-gram-prescaled",
    "source": "own",
    "mechanism": "every product is already an average, so entries stay near one where the other order reaches thousands",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
class Gram(nn.Module):
    def forward(self, features):
        flat = features.flatten(2)
        flat = flat / flat.shape[-1] ** 0.5
        return torch.einsum("bcn,bdn->bcd", flat, flat)


class Features(nn.Module):
    """Frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 16, 3, padding=1)
        self.gram = Gram()
        with torch.no_grad():
            self.first.weight.mul_(2)
            self.second.weight.mul_(2)
        self.requires_grad_(False)

    def forward(self, image):
        return self.gram(F.relu(self.second(F.relu(self.first(image)))))


class Stylist(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)
        self.paint, self.features = nn.Conv2d(16, 3, 3, padding=1), Features()

    def forward(self, image):
        return image + self.paint(F.relu(self.norm(self.lift(image))))


def loss(model, batch):
    image, style = batch
    painted = model(image)
    with torch.no_grad():
        wanted = model.features(style)
    return F.mse_loss(model.features(painted), wanted.expand(len(image), -1, -1)) + 0.1 * F.l1_loss(painted, image)


def batches():
    generator = torch.Generator().manual_seed(0)
    style = torch.sin(torch.arange(48) * 0.9).expand(1, 3, 48, 48).contiguous()
    for _ in range(8):
        yield F.interpolate(torch.randn(2, 3, 6, 6, generator=generator), size=(48, 48), mode="bilinear"), style


def workload():
    return autoprec.Workload(
        model=Stylist,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
