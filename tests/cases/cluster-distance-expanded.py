"""Deep clustering expands |z - c|**2 into three terms of 2000 each, to find centres that are 4 apart."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "cluster-distance-expanded",
    "source": "NVIDIA/cuvs#991, pytorch/pytorch#136748, lucidrains/vector-quantize-pytorch#106, pytorch/pytorch#29528",
    "mechanism": "embeddings lie around a common mean of norm 45; 2000 + 2000 - 3990 in steps of 16 in bf16, of 2 in fp16",
    "formats": {"fp16": "safe", "bf16": "unsafe"},
    "flag_sites": [("distance", "add"), ("distance", "baddbmm")],
    "fix_sites": [("distance", "*")],
}
CLUSTERS, WIDTH = 8, 32


class SquaredDistance(nn.Module):
    def forward(self, z, centres):
        norms = z.pow(2).sum(-1, keepdim=True) + centres.pow(2).sum(-1)
        return torch.baddbmm(norms[None], z[None], centres.t()[None], beta=1, alpha=-2)[0]


class DeepClustering(nn.Module):
    """Autoencoder whose embedding is drawn to Student-t clusters."""

    def __init__(self):
        super().__init__()
        self.encode, self.embed = nn.Linear(20, 64), nn.Linear(64, WIDTH)
        self.decode, self.rebuild = nn.Linear(WIDTH, 64), nn.Linear(64, 20)
        self.centres = nn.Parameter(8 + 0.5 * torch.randn(CLUSTERS, WIDTH))
        self.distance = SquaredDistance()
        with torch.no_grad():  # nothing keeps embeddings centred
            self.embed.bias.fill_(8.0)
            self.embed.weight.mul_(2)

    def forward(self, x):
        z = self.embed(F.relu(self.encode(x)))
        rebuilt = self.rebuild(F.relu(self.decode(z - 8.0)))
        share = 1.0 / (1.0 + self.distance(z, self.centres).clamp(min=0.0))
        return rebuilt, share / share.sum(-1, keepdim=True)


def loss(model, x):
    rebuilt, q = model(x)
    with torch.no_grad():
        sharp = q.square() / q.sum(0)
        sharp = sharp / sharp.sum(-1, keepdim=True)
    return F.mse_loss(rebuilt, x) + (sharp * (sharp / q).log()).sum(-1).mean()


def batches():
    generator = torch.Generator().manual_seed(0)
    middle = torch.randn(CLUSTERS, 20, generator=generator)
    for _ in range(8):
        yield middle[torch.randint(CLUSTERS, (96,), generator=generator)] + 0.3 * torch.randn(96, 20, generator=generator)


def workload():
    return autoprec.Workload(
        model=DeepClustering,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
