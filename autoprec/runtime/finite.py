"""Whether a step would be finite, as one number on the device that nobody has to wait for."""

from collections.abc import Sequence
from typing import Any

import torch

from autoprec.runtime.scaled_gradients import parameters_of

# Larger gradients count as not finite. Optimizers square them, and add weights to them: of 2**60 even the square of
# (gradient + weight decay) is far from the end of FP32. See `runtime.guard.finite_updates`.
GRADIENT_LIMIT = 2.0**60


def not_finite(value: torch.Tensor) -> torch.Tensor:
    """Return 1 if an element of `value` is infinite or not a number, else 0; a float32 scalar on its device."""
    return (~torch.isfinite(value)).any().to(torch.float32)


def beyond(norm: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return 1 if `norm` is above the limit of gradients, times `scale` if they are scaled, or not a number; else 0."""
    limit = GRADIENT_LIMIT if scale is None else GRADIENT_LIMIT * scale.to(norm.device, non_blocking=True)
    return (~(norm <= limit)).to(torch.float32)


def non_finite(
    optimizers: Sequence[torch.optim.Optimizer],
    norm: torch.Tensor | None = None,
    loss: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return 1 if a gradient of the optimizers or `loss` is not finite, else 0; None if there is no gradient.

    Gradients whose norm is beyond `GRADIENT_LIMIT` (1.15e18) count as not finite; `scale` is what they are multiplied
    by. The `norm` of all is used where it is known, and then no gradient is read. Where parameters are sharded, the
    ranks that hold the shards are asked, in one small collective.
    """
    sharded = False
    if type(norm) is torch.Tensor:  # where gradients are sharded their norm is of another type
        total = norm
    else:
        gradients = [g for optimizer in optimizers for each in parameters_of(optimizer) if (g := each.grad) is not None]
        if not gradients:
            return None
        is_plain = set(map(type, gradients)) == {torch.Tensor}
        sharded = not is_plain and any(hasattr(each, "to_local") for each in gradients)
        total = _norm(gradients, is_plain=is_plain)
    if loss is not None:  # nan where the loss is infinite too
        total = total + 0.0 * loss.detach().to(total.device, torch.float32, non_blocking=True).sum()
    found = beyond(total, scale)
    if sharded:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found


def _norm(gradients: list[Any], *, is_plain: bool) -> torch.Tensor:
    """Return the sum of the norms of all gradients in FP32, by device and dtype in one kernel where torch has one.

    A norm reads what torch's other reductions read, and is as fast as the fastest of them; what is left of this pass
    beside that is Python, so that gradients of one kind, the usual case, take the shortest way.
    """
    first = gradients[0]
    is_dense = is_plain and not any(each.is_sparse for each in gradients)
    if is_dense and all(each.dtype == first.dtype and each.device == first.device for each in gradients):
        return _norm_of_one_kind(gradients, first.dtype)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        values: Any = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if values.is_sparse:
            values = values.coalesce().values()
        groups.setdefault((values.device, values.dtype), []).append(values)
    norms = [_norm_of_one_kind(each, dtype) for (_, dtype), each in groups.items()]
    return torch.stack([each.to(norms[0].device, non_blocking=True) for each in norms]).sum()


def _norm_of_one_kind(gradients: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float32 if dtype.itemsize == 2 else None
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).sum().float()
