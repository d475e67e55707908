"""Edits of weights that leave no trace in their version counter, noticed all the same.

A cast of a weight is stale as soon as the weight changes. torch counts in-place writes in `_version`, except for two
kinds: a fused optimizer writes without counting, and what is written through `Parameter.data` is counted on the
temporary tensor that `.data` returned. Both are met by ordinary training code, so both are watched here: every
optimizer step, through torch's own hooks, and every reading or setting of `.data` of a parameter, through a property
in place of the attribute that `nn.Parameter` inherits.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Holder(Protocol):
    """Somebody who holds casts of weights."""

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Drop the casts of these weights."""

    def stepped(self, optimizer: Optimizer, weights: Sequence[torch.Tensor]) -> None:
        """Drop the casts of the weights of an optimizer: it is about to step, or has."""


_holders: WeakSet[Holder] = WeakSet()
_running: dict[int, Holder] = {}  # by their `id`; a dict, since other threads enter theirs while one is told
_installed = False


def watch_for(holder: Holder) -> None:
    """Tell `holder`, as long as it lives, of every optimizer step and every touch of `.data`."""
    _install()
    _holders.add(holder)


def tell(holder: Holder) -> None:
    """Tell `holder` of them until `tell_no_more(holder)`; somebody must have called `watch_for` before."""
    _running[id(holder)] = holder


def tell_no_more(holder: Holder) -> None:
    """End what `tell(holder)` began."""
    del _running[id(holder)]


def _install() -> None:
    """Put the two watchers in place, once a process."""
    global _installed  # noqa: PLW0603 they are there once a process
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    inherited: Any = torch._C.TensorBase.__dict__["data"]

    def read(self: nn.Parameter) -> torch.Tensor:
        _notice_data(self)
        data: torch.Tensor = inherited.__get__(self)
        return data

    def write(self: nn.Parameter, value: torch.Tensor) -> None:
        _notice_data(self)
        inherited.__set__(self, value)

    nn.Parameter.data = property(read, write, doc=inherited.__doc__)  # type: ignore[assignment]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Drop casts that are of no use any more: their memory is free in the step."""
    _tell_of_step(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Drop casts that a closure has made, which may have run the model inside the step."""
    _tell_of_step(optimizer)


def _tell_of_step(optimizer: Optimizer) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step counts its writes in the versions
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for holder in (*_holders, *_running.values()):
        holder.stepped(optimizer, weights)


def _forget(weights: Iterable[torch.Tensor]) -> None:
    for holder in (*_holders, *_running.values()):
        holder.forget(weights)


def _notice_data(weight: nn.Parameter) -> None:
    _forget((weight,))
