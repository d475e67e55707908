"""A loss summed over pixels needs no loss scale at all: with the customary 2**16 every fp16 gradient is inf."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "summed-loss-static-scale",
    "source": "NVIDIA/apex#715, deepspeedai/DeepSpeedExamples#418, facebookresearch/fairseq#515, "
              "NVIDIA/DeepLearningExamples#146",
    "mechanism": "gradients of a sum over 16 x 1024 pixels are in the hundreds; times 65536 they leave fp16",
    "kind": "gradients",
    "expect": "fp16: a loss scale of 2**4 at most (or a mean instead of a sum); bf16 needs none",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}


class VAE(nn.Module):
    """The usual evidence bound: squared error summed per batch plus divergence."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(1, 8, 4, stride=4)
        self.norm = nn.GroupNorm(2, 8)
        self.mean, self.log_variance = nn.Linear(512, 8), nn.Linear(512, 8)
        self.decode, self.paint = nn.Linear(8, 512), nn.ConvTranspose2d(8, 1, 4, stride=4)

    def forward(self, image):
        x = F.relu(self.norm(self.encode(image))).flatten(1)
        mean, log_variance = self.mean(x), 0.1 * self.log_variance(x)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0)).to(mean.dtype)
        latent = mean + torch.exp(0.5 * log_variance) * noise
        return self.paint(F.relu(self.decode(latent)).unflatten(1, (8, 8, 8))), mean, log_variance


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        yield F.interpolate(torch.randn(16, 1, 4, 4, generator=generator), size=(32, 32), mode="bilinear")


def loss(model, image):
    made, mean, log_variance = (part.float() for part in model(image))
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return F.mse_loss(made, image, reduction="sum") + divergence


def workload():
    return autoprec.Workload(
        model=VAE,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
    )


def gradient(dtype, scale):
    """Scaled gradient as the lowered layers hand it to their weights."""
    torch.manual_seed(0)
    model = VAE().to(dtype)
    (loss(lambda image: model(image.to(dtype)), next(iter(batches()))) * scale).backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters()]) / scale


def verify():
    reference = gradient(torch.float32, 1.0)

    def error(dtype, scale):
        return ((gradient(dtype, scale) - reference).norm() / reference.norm()).item()

    return {
        "fp16 at the customary 2**16: not finite": not gradient(torch.float16, 2.0 ** 16).isfinite().all().item(),
        "fp16 at 2**10: not finite": not gradient(torch.float16, 2.0 ** 10).isfinite().all().item(),
        "fp16 at 2**4 and unscaled: right": max(error(torch.float16, 16.0), error(torch.float16, 1.0)) < 0.02,
        "bf16 unscaled: right": error(torch.bfloat16, 1.0) < 0.05,
    }
