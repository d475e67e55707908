"""A small model, policies that differ from fp32 in storage alone, and a training loop, for the tests of storage."""

from typing import Any

import torch
from torch import nn

from autoprec.policy import LossScale, Parameters, Policy, Rule
from autoprec.runtime import Precision

MASTER = {"storage": "bf16", "master": "fp32"}
STOCHASTIC = {"storage": "bf16", "rounding": "stochastic"}


def storing(loss_scale: LossScale | None = None, **parameters: Any) -> Policy:
    return Policy(
        name="stored",
        rules=(Rule(sites="*", format="fp32"),),
        parameters=Parameters(**parameters),
        loss_scale=loss_scale or LossScale(),
    )


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision, steps: range | tuple[int, ...]
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        with precision.loss():
            loss = model(batch(step)).square().mean()
        precision.scaler.scale(loss).backward()
        precision.scaler.step(optimizer)
        precision.scaler.update()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
