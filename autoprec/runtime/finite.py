"""Whether a step would be finite, as one number on the device that nobody has to wait for."""

from collections.abc import Sequence
from typing import Any

import torch

from autoprec.runtime.scaled_gradients import parameters_of


def not_finite(value: torch.Tensor) -> torch.Tensor:
    """Return 1 if an element of `value` is infinite or not a number, else 0; a float32 scalar on its device."""
    return (~torch.isfinite(value)).any().to(torch.float32)


def non_finite(
    optimizers: Sequence[torch.optim.Optimizer], norm: torch.Tensor | None = None, loss: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return 1 if a gradient of the optimizers or `loss` is not finite, else 0; None if there is no gradient.

    Gradients too large for their norm in FP32 (about 1.8e19) count as not finite: their squares would freeze Adam. The
    `norm` of all is used where it is known, and then no gradient is read. Where parameters are sharded, the ranks that
    hold the shards are asked, in one small collective.
    """
    given = (each.grad for optimizer in optimizers for each in parameters_of(optimizer))
    gradients = [gradient for gradient in given if gradient is not None]
    if not gradients:
        return None
    sharded = any(type(each) is not torch.Tensor and hasattr(each, "to_local") for each in gradients)
    norms = _norms(gradients) if norm is None or sharded else [norm]
    home = norms[0].device
    total = torch.stack([each.to(home, non_blocking=True) for each in norms]).sum()
    if loss is not None:  # nan where the loss is infinite too
        total = total + 0.0 * loss.detach().to(home, torch.float32, non_blocking=True).sum()
    found = not_finite(total)
    if sharded:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found


def _norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each gradient in FP32, by device and dtype in one kernel where torch has one."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        values: Any = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if values.is_sparse:
            values = values.coalesce().values()
        if values.numel():
            groups.setdefault((values.device, values.dtype), []).append(values)
    return [
        norm.float()
        for (_, dtype), each in groups.items()
        for norm in torch._foreach_norm(each, 2, dtype=torch.float32 if dtype.itemsize == 2 else None)
    ] or [torch.zeros(())]
