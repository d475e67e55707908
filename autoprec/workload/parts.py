"""The parts of a workload when it runs: its model, optimizer and loss, or a word on what is wrong with them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoprec.errors import WorkloadError, a_or_an
from autoprec.workload.workload import Workload

if TYPE_CHECKING:
    import torch


def build_model(workload: Workload, device: "torch.device | str") -> "torch.nn.Module":
    """Return a fresh model on `device`.

    Raises: `WorkloadError` if `model()` returns anything but a module.
    """
    import torch

    model: object = workload.model()
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"model() returned {a_or_an(model)}; it must return a fresh torch.nn.Module")
    return model.to(device)


def build_optimizer(make: Callable[[Any], Any], model: "torch.nn.Module") -> "torch.optim.Optimizer":
    """Return the optimizer that `make` makes for the parameters of `model`.

    Raises: `WorkloadError` if it makes anything else.
    """
    import torch

    optimizer: object = make(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer(params) returned {a_or_an(optimizer)}; it must return a torch.optim.Optimizer")
    return optimizer


def check_loss(loss: Any) -> "torch.Tensor":
    """Return `loss` if it is a real scalar tensor that requires grad.

    Raises: `WorkloadError` for anything else.
    """
    import torch

    if not isinstance(loss, torch.Tensor):
        got = a_or_an(loss)
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
