"""Replacing `forward` of single modules, so that it can be undone and survives `copy.deepcopy`."""

import inspect
import types
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

from torch import nn

_OWN = "_autoprec_own_forward"
_REPLACEMENT = "_autoprec_replacement"
LEAF = "_autoprec_leaf"
"""Where a module whose replacement is shared with others has what is its own."""
SEAL = "_autoprec_seal"
"""Where a module has what keeps it from being pickled with its replacement."""


def with_constants(function: Callable[..., Any], constants: Mapping[str, str]) -> Callable[..., Any]:
    """Return `function` with other constants in its code, which is then its own.

    torch.compile guards on each value in a closure, in each module, at each call, and on all constants by the code.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__
    function.__code__ = code.replace(
        co_consts=tuple(constants.get(each, each) if isinstance(each, str) else each for each in code.co_consts)
    )
    return function


def replace_forward(module: nn.Module, replacement: Callable[..., Any]) -> None:
    """Make `module.forward(...)` return `replacement(module, ...)` until `restore_forward(module)`.

    `replacement` comes from `made_for(module, ...)`, or serves several modules and comes from `as_replacement`.

    It becomes a bound method in the instance's dictionary: `type(module)`, `isinstance`, hooks and
    state-dict keys stay as they are, `inspect.signature` still shows the original's, and a deep copy is bound to
    the copied module. A forward that the instance had of its own is kept there too, so that it is copied alike.
    """
    if (own := module.__dict__.get("forward")) is not None:
        module.__dict__[_OWN] = own
    module.__dict__["forward"] = types.MethodType(replacement, module)


def made_for(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a replacement of this module's forward alone, with the name and signature of that."""
    own = module.__dict__.get("forward")
    # Of its own: torch.compile keeps what it compiled, and how often it may do so again, by the code object.
    assert isinstance(function, types.FunctionType)
    function.__code__ = function.__code__.replace()
    as_replacement(function, type(module).forward if own is None else own)
    if own is not None:  # it takes no module: what is bound takes one more argument than it shows
        shown = inspect.signature(own)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        arguments = [each.replace(kind=max(each.kind, first.kind)) for each in shown.parameters.values()]
        setattr(function, "__signature__", shown.replace(parameters=[first, *arguments]))  # noqa: B010
    return function


def as_replacement(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a replacement of `original`, with its name and signature."""
    setattr(function, _REPLACEMENT, True)
    return update_wrapper(function, original)


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward that `module` had before `replace_forward`."""
    own: Callable[..., Any] | None = module.__dict__.get(_OWN)
    # partial: torch.compile rebuilds a bound method by its name, which would be the replacement.
    return partial(type(module).forward, module) if own is None else own


def is_replaced(module: nn.Module) -> bool:
    """Return whether the forward of `module` is one that `replace_forward` put there."""
    return hasattr(module.__dict__.get("forward"), _REPLACEMENT)


def restore_forward(module: nn.Module) -> None:
    """Give `module` the forward it had before `replace_forward`; a module with another one keeps it."""
    if not is_replaced(module):
        return
    own = module.__dict__.pop(_OWN, None)
    for name in (LEAF, SEAL):
        module.__dict__.pop(name, None)
    if own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = own
