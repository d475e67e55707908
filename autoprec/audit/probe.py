"""One forward and backward pass of a run on any batch, after which nothing has been learned from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.measure import Training
from autoprec.runtime.matmul_precision import restore, set_float32_matmul
from autoprec.workload import Workload
from autoprec.workload.batches import map_tensors
from autoprec.workload.seeding import seeded


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What came of a pass: the loss, the parameters whose gradients are not finite, or what it raised."""

    loss: float = 0.0
    broken: tuple[str, ...] = ()
    raised: str = ""

    @property
    def loss_is_finite(self) -> bool:
        """Return whether the loss is a number."""
        return not self.raised and abs(self.loss) < float("inf")

    @property
    def is_finite(self) -> bool:
        """Return whether loss and gradients are."""
        return self.loss_is_finite and not self.broken

    def __str__(self) -> str:
        if self.raised:
            return f"raises {self.raised}"
        if not self.loss_is_finite:
            return f"its loss is {self.loss}"
        return f"the gradient of {self.broken[0]} is not finite" if self.broken else "finite"


def probe(
    run: Training, workload: Workload, weights: Mapping[str, Any], batch: Any, *, seed: int, scale: float = 1.0
) -> Probe:
    """Return what comes of the loss times `scale` on a copy of `batch`, for a model with `weights`."""
    load_weights(run, weights)
    run.model.zero_grad(set_to_none=True)
    previous = set_float32_matmul(run.device.type, run.precision.policy.float32_matmul)
    try:
        with seeded(seed, device=run.device):
            with run.precision.loss():
                loss = workload.loss(run.model, map_tensors(batch, torch.clone))
            (loss if scale == 1 else loss * scale).backward()
    except Exception as error:  # noqa: BLE001 a batch that is no batch raises anything
        return Probe(raised=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    finally:
        restore(previous)
    gradients = ((name, parameter.grad) for name, parameter in run.model.named_parameters())
    broken = tuple(name for name, grad in gradients if grad is not None and not _is_finite(grad))
    run.model.zero_grad(set_to_none=True)
    return Probe(loss=float(loss.detach()), broken=broken)


def load_weights(run: Training, weights: Mapping[str, Any]) -> None:
    """Give the model of a run these weights and buffers."""
    run.model.load_state_dict(weights)


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
