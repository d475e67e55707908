"""A critic with a gradient penalty whose slopes are near one, guarded by 1e-3 under the root."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "hc-gradient-penalty",
    "source": "own",
    "mechanism": "squares of slopes between 0.01 and 1 fit fp16, and so does the guard",
    "formats": {"fp16": "safe", "bf16": "safe"},
    "flag_sites": [],
    "fix_sites": [],
}
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 48), nn.Linear(48, 48), nn.Linear(48, 32)])
        self.out = nn.Linear(32, 1)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(2)

    def forward(self, x):
        for layer in self.layers:
            x = F.softplus(layer(x))
        return self.out(x).squeeze(-1)


def critic_loss(critic, batch):
    real, fake, mix = batch
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    norm = (slope.pow(2).sum(-1) + 1e-3).sqrt()
    return critic(fake).mean() - critic(real).mean() + (norm - 1).pow(2).mean()


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        angle = 6.28 * torch.rand(64, 4, generator=generator)
        real = torch.cat([angle.cos(), angle.sin()], dim=-1)
        yield real, 0.7 * torch.randn(64, 8, generator=generator), torch.rand(64, 1, generator=generator)


def workload():
    return autoprec.Workload(
        model=Critic,
        batches=batches,
        loss=critic_loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=5e-4, betas=(0.5, 0.9)),
    )
