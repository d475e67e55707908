"""Edits of weights that leave no trace in their version counter, noticed all the same.

A cast of a weight is stale as soon as the weight changes. torch counts in-place writes in `_version`, except for two
kinds: a fused optimizer writes without counting, and what is written through `Parameter.data` is counted on the
temporary tensor that `.data` returned. Both are met by ordinary training code, so both are watched here: every
optimizer step, through torch's own hooks, and every reading or setting of `.data` of a parameter, through a property
in place of the attribute that `nn.Parameter` inherits.
"""

from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Holder(Protocol):
    """Somebody who holds casts of weights across forwards."""

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Drop the casts of these weights."""


EDITS: dict[int, int] = {}
"""How often `.data` was touched or an optimizer stepped, by the `id` of the weight: counted once it is in here."""

_holders: WeakSet[Holder] = WeakSet()
_installed = False


def watch_for(holder: Holder) -> None:
    """Tell `holder`, as long as it lives, of every optimizer step and every touch of `.data`."""
    _install()
    _holders.add(holder)


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


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Drop casts that are of no use any more: their memory is free in the step."""
    if not torch.compiler.is_compiling():  # a compiled step counts its writes in the versions
        _forget(_weights_of(optimizer))


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count the step for each weight; a closure may have run the model inside the step, too."""
    if torch.compiler.is_compiling():
        return
    weights = _weights_of(optimizer)
    for key in map(id, weights):
        if key in EDITS:
            EDITS[key] += 1
    _forget(weights)


def _weights_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _forget(weights: Iterable[torch.Tensor]) -> None:
    for holder in tuple(_holders):
        holder.forget(weights)


def _notice_data(weight: nn.Parameter) -> None:
    if id(weight) in EDITS:  # else nobody has cast it
        EDITS[id(weight)] += 1
        _forget((weight,))
