"""Activation checkpointing: what it runs again in the backward pass belongs to the frame it ran in first.

A module that is checkpointed opens its own frame both times. A function that is checkpointed inside a module's
`forward` does not: without help its ops would run again with nobody to cast them.
"""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from autoprec.runtime.inside_fp32 import set_aside

Entering = Callable[[Callable[..., Any]], Callable[..., Any]]

_current: Callable[[], Entering | None] | None = None


def keep_frames(current: Callable[[], Entering | None]) -> None:
    """Have checkpointed functions run in the frame they were called in, first time and again. Idempotent.

    `current()` returns how to wrap a function so, or None where the running thread casts nothing: then checkpointing
    is torch's own. Two functions inside `torch.utils.checkpoint` are replaced, since checkpointing is no torch function
    that a mode would see; `checkpoint` itself, which everybody imports by name, looks them up at each call.
    """
    global _current  # noqa: PLW0603 the replacement is there once a process
    if _current is not None:
        return
    _current = current
    without_reentry = torch_checkpoint._checkpoint_without_reentrant_generator
    reentrant = torch_checkpoint.CheckpointFunction

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return without_reentry(_with_nothing_set(_framed(function)), *args, **kwargs)

    def apply(cls: type, function: Callable[..., Any], *args: Any) -> Any:
        return super(reentrant, cls).apply(_framed(function), *args)  # type: ignore[misc]

    torch_checkpoint._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]
    reentrant.apply = classmethod(apply)  # type: ignore[assignment]


def _with_nothing_set(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for a run inside the backward of a site, which may have set the precision for itself."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with set_aside():
            return function(*args, **kwargs)

    return run


def _framed(function: Callable[..., Any]) -> Callable[..., Any]:
    entering = _current() if _current is not None else None
    return function if entering is None else entering(function)
