"""What ranks tell each other so that all decide alike: a few numbers at each sample, and a choice where one is made."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from autoprec.errors import GuardError

T = TypeVar("T")


class Ranks:
    """The processes that train one model together; a process alone is one that has nobody to ask.

    `group` is a process group, None for a process alone, or "auto": the default group where one is initialized.

    Raises: `GuardError` for anything else.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = _group(group)
        distributed = torch.distributed if self._group is not None else None
        self.count = 1 if distributed is None else distributed.get_world_size(self._group)
        self.rank = 0 if distributed is None else distributed.get_rank(self._group)
        if self.count == 1:
            self._group = None
        self._device = device

    @property
    def is_alone(self) -> bool:
        """Return whether there is nobody to ask."""
        return self.count == 1

    def gathered(self, numbers: Mapping[str, float]) -> tuple[Mapping[str, float], ...]:
        """Return the numbers of every rank, in one collective; each rank must give the same names."""
        if self.is_alone:
            return (dict(numbers),)
        ours = torch.tensor(list(numbers.values()), dtype=torch.float64, device=self._device)
        all_of = [torch.empty_like(ours) for _ in range(self.count)]
        torch.distributed.all_gather(all_of, ours, group=self._group)
        return tuple(dict(zip(numbers, each.tolist(), strict=True)) for each in all_of)

    def all_of(self, value: T) -> tuple[T, ...]:
        """Return the value of every rank; called by all ranks or by none."""
        if self.is_alone:
            return (value,)
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=self._group)
        return tuple(values)


def odd_one(rows: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0 in one of `names`, and what that is called; None if none does."""
    for name, called in names.items():
        for rank, row in enumerate(rows):
            if not _same(row[name], rows[0][name]):
                return rank, called
    return None


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def is_replicated(model: nn.Module, given: nn.Module) -> bool:
    """Return whether DistributedDataParallel keeps the weights of `model` equal on all ranks."""
    from autoprec.runtime.storage import is_in_ddp

    return isinstance(given, nn.parallel.DistributedDataParallel) or is_in_ddp(model)


def _group(group: Any) -> Any:
    if group is None:
        return None
    distributed = sys.modules.get("torch.distributed")
    initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if group == "auto":
        return torch.distributed.group.WORLD if initialized else None
    if not initialized or not isinstance(group, torch.distributed.ProcessGroup):
        raise GuardError(
            f'guard: group is {group!r}; allowed: a process group, None for a process that trains alone, or "auto"'
        )
    return group
