"""How a call is written into an fx graph, so that the graph can be executed and printed as Python.

fx prints every call target by a name it can import again; a torch function that has no such name, and any
argument that does not print as itself, is kept as an attribute of the graph module instead.
"""

import operator
import types
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import _get_qualified_name

from autoprec.runtime.calls import Call

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_importable: dict[Any, bool] = {getattr: True, setattr: True, operator.getitem: True, operator.call: True}


def target_of(func: Any, call: Call, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return what to call, and with which arguments: a property access becomes `getattr` or `setattr`."""
    if not call.property_name:
        return func, args
    if func.__name__ == "__set__":
        return setattr, (args[0], call.property_name, args[1])
    return getattr, (args[0], call.property_name)


def is_foreign(func: Any) -> bool:
    """Return whether `func` is not torch's own, so that its name does not tell what it computes."""
    if isinstance(func, OpOverload):
        return str(func.namespace) != "aten"
    if isinstance(func, OpOverloadPacket):
        return not str(func).startswith("aten.")
    return isinstance(func, types.FunctionType) and not str(func.__module__).startswith("torch.")


def is_plain(value: Any) -> bool:
    """Return whether fx can print the argument `value` so that it reads back."""
    return type(value) in _PLAIN


def is_importable(function: Any) -> bool:
    """Return whether fx can print a call of `function` by the name under which torch holds it."""
    if function not in _importable:
        _importable[function] = _is_importable(function)
    return _importable[function]


def _is_importable(function: Any) -> bool:
    try:
        path = _get_qualified_name(function).split(".")
    except (RuntimeError, AttributeError):
        return False
    owner: Any = {"torch": torch}.get(path[0])
    for name in path[1:]:
        owner = getattr(owner, name, None)
    return owner is function
