"""A Lipschitz penalty squares the Gram matrix three times: sigma ** 16 leaves fp16 although its root is about 2."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "lipschitz-gram-iteration",
    "source": "own, after Delattre et al. 2023 (Gram iteration, which rescales for this reason); "
              "pytorch/pytorch#44350 for norms whose square overflows",
    "mechanism": "a sigma of 2.5 becomes 2.5 ** 16 = 2.3e6 in the third square, which the root of the norm would undo",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("bound", "einsum", 3), ("bound", "norm")],
    "fix_sites": [("bound", "einsum"), ("bound", "norm"), ("bound", "pow")],
}


class SpectralBound(nn.Module):
    """Upper bound of the largest singular value: Frobenius norm of W'W after repeated squaring, rooted."""

    def forward(self, weight):
        gram = torch.einsum("oi,oj->ij", weight, weight)
        for _ in range(3):
            gram = torch.einsum("ij,jk->ik", gram, gram)
        return torch.norm(gram) ** (1 / 16)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 48), nn.Linear(48, 48), nn.Linear(48, 48)])
        self.out = nn.Linear(48, 1)
        self.bound = SpectralBound()
        with torch.no_grad():  # one layer has grown
            self.layers[1].weight.mul_(2.5)

    def forward(self, x):
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        return self.out(x).squeeze(-1)


def loss(model, batch):
    real, fake = batch
    gap = F.softplus(-model(real)).mean() + F.softplus(model(fake)).mean()
    lipschitz = sum(model.bound(layer.weight) for layer in model.layers)
    return gap + 0.05 * lipschitz


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        angle = 6.28 * torch.rand(64, 6, generator=generator)
        real = torch.cat([angle.cos(), angle.sin()], dim=-1)
        yield real, torch.randn(64, 12, generator=generator)


def workload():
    return autoprec.Workload(
        model=Critic,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4, betas=(0.5, 0.9)),
    )
