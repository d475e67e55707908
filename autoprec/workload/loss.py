"""What a loss must be for a training step to start from it."""

from typing import TYPE_CHECKING, Any

from autoprec.errors import WorkloadError

if TYPE_CHECKING:
    import torch


def check_loss(loss: Any) -> "torch.Tensor":
    """Return `loss` if it is a real scalar tensor that requires grad.

    Raises: `WorkloadError` for anything else.
    """
    import torch

    if not isinstance(loss, torch.Tensor):
        got = f"a {type(loss).__name__}"
    elif loss.dim() != 0:
        got = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.is_floating_point():
        got = f"a tensor of {str(loss.dtype).removeprefix('torch.')}"
    elif not loss.requires_grad:
        got = "a tensor that does not require grad (computed under no_grad, detached, or from frozen parameters?)"
    else:
        return loss
    raise WorkloadError(
        f"loss(model, batch) returned {got}; "
        "it must return a scalar tensor that requires grad, such as F.cross_entropy(model(x), y)"
    )
