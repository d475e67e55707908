"""Calls that are recorded as one, whatever runs inside: custom autograd Functions and functorch transforms.

What runs inside has its own way back, or works on tensors that exist only there.
"""

import types
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import apis, eager_transforms
from torch.utils.checkpoint import CheckpointFunction

from autoprec.capture.facts import tensors_in_tree

# What the public transforms (torch.func.vjp, jacrev, hessian ...) look up when they are called.
_TRANSFORMS = (
    (apis, "vmap_impl", "vmap"),
    (eager_transforms, "grad_impl", "grad"),
    (eager_transforms, "grad_and_value_impl", "grad_and_value"),
    (eager_transforms, "_vjp_with_argnums", "vjp"),
    (eager_transforms, "_jvp_with_argnums", "jvp"),
)

Once = Callable[[Callable[..., Any], str, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def opaque_calls(once: Once) -> Iterator[None]:
    """Hand each opaque call of the block to `once(function, name, args, kwargs)`, which runs it."""
    originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in _TRANSFORMS]
    apply = torch.autograd.Function.__dict__["apply"]

    def apply_once(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # only saves memory: record what it runs
            with torch.enable_grad():
                return args[0](*args[2:])
        return once(apply.__get__(None, cls), cls.__name__, args, kwargs)

    def watched(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: once(original, name, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply_once)  # type: ignore[assignment]
    for owner, attribute, name in _TRANSFORMS:
        setattr(owner, attribute, watched(getattr(owner, attribute), name))
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


def cells_of(functions: Iterable[Any], known: Container[Any]) -> list[tuple[types.CellType, Any]]:
    """Return the closure cells that hold tensors, and their contents, of Python functions and those they close over.

    `known` are functions that have a value of their own in a replay: the cells that hold them are returned too.
    """
    found: list[tuple[types.CellType, Any]] = []
    todo = list(functions)
    seen: set[Any] = set()
    while todo:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or function in seen or function in known:
            continue
        seen.add(function)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            todo.append(content)
            is_known = isinstance(content, types.FunctionType) and content in known
            if is_known or next(tensors_in_tree(content), None) is not None:
                found.append((cell, content))
    return found


def call_with_cells(
    cells: tuple[types.CellType, ...], contents: tuple[Any, ...], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return `function(*args, **kwargs)`, run while closure cells hold `contents`."""
    before = [cell.cell_contents for cell in cells]
    for cell, content in zip(cells, contents, strict=True):
        cell.cell_contents = content
    try:
        return function(*args, **kwargs)
    finally:
        for cell, content in zip(cells, before, strict=True):
            cell.cell_contents = content
