"""Small guarded runs to plant faults in: a net, its data, and an ordinary loop that calls the guard."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autoprec
from autoprec.policy import LossScale, Parameters, Policy, Rule

Batch = tuple[torch.Tensor, torch.Tensor]
BAND = {"steps": [5.0, 15.0, 40.0, 80.0], "means": [4.0, 2.5, 1.0, 0.6], "scatter": 0.5}


def net(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 1))


def batch_at(step: int) -> Batch:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].sum(1, keepdim=True)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def policy_of(
    name: str = "bf16",
    *,
    low: str = "0:linear",
    scale: LossScale | None = None,
    calibration: Mapping[str, Any] | None = None,
    parameters: Parameters | None = None,
) -> Policy:
    """Return a policy that runs `low` sites in the format `name` and the rest in FP32."""
    rest = () if low == "*" else (Rule(sites="*", format="fp32"),)
    return Policy(
        name=name,
        rules=(Rule(sites=low, format=name), *rest),
        loss_scale=scale or LossScale(),
        parameters=parameters or Parameters(),
        evidence={} if calibration is None else {"calibration": {"schema": 1, **calibration}},
    )


class Loop:
    """A training loop with a guard; `events` are those that it was told of."""

    def __init__(
        self, policy: Policy, *, model: nn.Module | None = None, lr: float = 1e-2, kind: Any = None, **options: Any
    ) -> None:
        self.model = model or net()
        self.precision = autoprec.apply(self.model, policy)
        self.optimizer = (kind or torch.optim.AdamW)(self.model.parameters(), lr=lr)
        self.events: list[autoprec.GuardEvent] = []
        self.losses: list[float] = []
        self.outcomes: list[autoprec.GuardOutcome] = []
        self.loss_of: Callable[[nn.Module, Batch], torch.Tensor] = loss_of
        options = {"every": 5, "snapshot_every": 10, "loss": self._loss, **options}
        self.guard = autoprec.guard(self.model, self.optimizer, self.precision, on_event=self.events.append, **options)

    def _loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.loss_of(model, batch)

    def step(self, batch: Batch, **arguments: Any) -> autoprec.GuardOutcome:
        self.optimizer.zero_grad()
        with self.precision.loss():
            loss = self.loss_of(self.model, batch)
        self.precision.backward(loss)
        self.losses.append(float(loss.detach()))
        self.outcomes.append(self.guard.step(loss, batch=batch, **arguments))
        return self.outcomes[-1]

    def train(self, steps: int, **arguments: Any) -> "Loop":
        for _ in range(steps):
            self.step(batch_at(len(self.losses)), **arguments)
        return self

    @property
    def findings(self) -> list[tuple[str, str]]:
        """Return detector and reaction of each event, but for the word on what rests."""
        return [(event.detector, event.reaction) for event in self.events if event.reaction != "info"]

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(each).all()) for each in self.model.state_dict().values())
