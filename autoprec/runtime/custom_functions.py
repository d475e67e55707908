"""Custom autograd Functions: what runs inside is left alone, with gradients or without."""

import functools
from typing import Any

import torch

from autoprec.runtime.running import RUNNING

_DONE = "_autoprec_left_alone"


def leave_functions_alone() -> None:
    """Have the casts leave alone what custom autograd Functions run where gradients are off too. Idempotent.

    With gradients, torch switches them off inside of a Function, by which the cast mode knows. Without, nothing tells:
    a model would compute in evaluation what it did not compute in training. Modules called inside cast as ever.
    """
    applied = torch.autograd.Function.__dict__["apply"]
    if hasattr(applied.__func__, _DONE):
        return

    @functools.wraps(applied.__func__)
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        mode = RUNNING.mode
        if mode is None or mode.frames[-1].grad_enabled:
            return applied.__get__(None, cls)(*args, **kwargs)
        frame = mode.frames[-1]
        frame.grad_enabled = True
        try:
            return applied.__get__(None, cls)(*args, **kwargs)
        finally:
            frame.grad_enabled = False

    setattr(apply, _DONE, True)
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
