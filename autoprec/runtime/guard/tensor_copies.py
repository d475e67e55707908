"""Copies of tensors of every kind that an optimizer may hold as its state."""

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def copy_of(tensor: torch.Tensor, *, to_host: bool = False) -> torch.Tensor:
    """Return a copy of `tensor` that shares nothing with it, in host memory if asked.

    Tensors made of others, as torchao's 8 bit state is, may know no `clone`: their parts are copied one by one.
    """
    found: Any = tensor.detach()
    if is_traceable_wrapper_subclass(found) and not hasattr(found, "to_local"):
        names, context = found.__tensor_flatten__()
        parts = {name: copy_of(getattr(found, name), to_host=to_host) for name in names}
        made: torch.Tensor = type(found).__tensor_unflatten__(parts, context, found.size(), found.stride())
        return made
    copied: torch.Tensor = found.cpu() if to_host and found.device.type != "cpu" else found.clone()
    return copied
