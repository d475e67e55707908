"""Optimizers that step in torch's fused kernels: one for all parameters of a group instead of a loop over them."""

import functools
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autoprec.errors import ApplyError
from autoprec.policy import Policy

_WITH_KERNELS: tuple[type[Optimizer], ...] = (Adagrad, Adam, AdamW, SGD)


def fused_fault(optimizer: Optimizer) -> str | None:
    """Return why torch cannot step `optimizer` in fused kernels; None if it can, or does so already."""
    kind = type(optimizer)
    if kind not in _WITH_KERNELS:  # a class derived from one of them may compute something else
        return f"{kind.__name__} has none in torch; those that have are {', '.join(e.__name__ for e in _WITH_KERNELS)}"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "differentiable=True is not possible in them"
        for parameter in group["params"]:
            if not _has_kernel(kind.__name__, parameter.device.type, parameter.dtype):
                return f"torch has no fused {kind.__name__} for {parameter.dtype} on {parameter.device.type}"
    return None


def fuse(policy: Policy, optimizer: Optimizer) -> Optimizer:
    """Return `optimizer` itself, from now on in fused kernels if `policy` says so: torch asks its groups at each step.

    Raises: `ApplyError` for an optimizer that has no such kernels for its parameters.
    """
    if policy.optimizer != "fused":
        return optimizer
    fault = fused_fault(optimizer)
    if fault is not None:
        raise ApplyError(
            f'precision.optimizer: policy "{policy.name}" has optimizer: fused, and {fault}; write optimizer: as_given'
        )
    for group in (*optimizer.param_groups, optimizer.defaults):
        group.update(fused=True, foreach=None)
    vars(optimizer)["_step_supports_amp_scaling"] = True  # as its constructor does
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device)  # where the kernels read it
    return optimizer


def check_fused(policy: Policy, optimizers: Iterable[Optimizer]) -> None:
    """Refuse to step an optimizer in a loop where the policy promises fused kernels.

    Raises: `ApplyError` for one that `fuse` would have changed.
    """
    for optimizer in optimizers if policy.optimizer == "fused" else ():
        if type(optimizer) in _WITH_KERNELS and not is_fused_throughout(optimizer):
            raise ApplyError(
                f'precision.step: policy "{policy.name}" has optimizer: fused, and this {type(optimizer).__name__} is '
                "not; write optimizer = precision.optimizer(optimizer) after it is built, and again after it has "
                "loaded a checkpoint of one that was not"
            )


def is_fused_throughout(optimizer: Optimizer) -> bool:
    """Return whether every group steps in fused kernels."""
    return all(group.get("fused") for group in optimizer.param_groups)


@functools.cache
def _has_kernel(kind: str, device: str, dtype: torch.dtype) -> bool:
    """Return whether a fused step runs: torch says so at the first one, in words that differ by class."""
    parameter = nn.Parameter(torch.zeros(1, device=device, dtype=dtype), requires_grad=dtype.is_floating_point)
    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        getattr(torch.optim, kind)([parameter], lr=0.0, fused=True).step()
    except RuntimeError:
        return False
    return parameter.requires_grad
