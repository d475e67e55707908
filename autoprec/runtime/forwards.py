"""Replacing `forward` of single modules, so that it can be undone and survives `copy.deepcopy`."""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

_REPLACES = "_autoprec_replaces"


def replace_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make `module.forward(...)` return `around(original, ...)` until `restore_forward(module)`.

    The replacement is a bound method in the instance's dictionary: `type(module)`, `isinstance`, hooks and
    state-dict keys stay as they are, `inspect.signature` still shows the original's, and a deep copy is bound to
    the copied module.
    """
    own: Callable[..., Any] | None = module.__dict__.get("forward")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = type(self).forward.__get__(self) if own is None else own
        return around(original, *args, **kwargs)

    functools.update_wrapper(forward, type(module).forward if own is None else own)
    setattr(forward, _REPLACES, own)
    module.__dict__["forward"] = types.MethodType(forward, module)


def restore_forward(module: nn.Module) -> None:
    """Give `module` the forward it had before `replace_forward`; a module that has its own keeps it."""
    current = module.__dict__.get("forward")
    if not hasattr(current, _REPLACES):
        return
    own = getattr(current, _REPLACES)
    if own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = own
