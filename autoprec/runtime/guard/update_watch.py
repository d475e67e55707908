"""Which steps need an eye: those of optimizer groups whose updates are not proven to be finite."""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoprec.runtime.guard.finite_updates import ROWS, Bound, bound, measured, unproven
from autoprec.runtime.guard.kept_step import KeptStep
from autoprec.runtime.guard.ranks import Ranks
from autoprec.runtime.optimizer_step import has_hooks_of_others
from autoprec.runtime.precision import Precision
from autoprec.runtime.stored import stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A group of an optimizer that is watched, and why."""

    optimizer: Optimizer
    index: int
    why: str

    @property
    def place(self) -> str:
        """Return which group it is."""
        return f"group {self.index} of {type(self.optimizer).__name__}"

    def __str__(self) -> str:
        return f"{self.place} ({self.why})"


@dataclass(kw_only=True)
class _Standing:
    """What is known of a group: its settings when last asked, the largest weight, and how far it may be by now."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    num_parameters: int = -1
    versions: tuple[tuple[torch.Tensor, int], ...] = ()
    is_hooked: bool = False
    fault: str = ""
    bound: Bound | None = None
    limit: float = 0.0
    rounding: float = 0.0
    memory: float = 0.0
    largest: float = math.nan
    moved: float = 0.0

    def is_of(self, group: Mapping[str, Any]) -> bool:
        """Return whether a group is as it was noted; a tensor is known by its version, which waits for no device.

        Asked at each step: settings are compared by identity, as equality may be a tensor, so that this takes a
        microsecond.
        """
        is_same = self.num_parameters == len(group["params"]) and len(self.settings) == len(group)
        is_same = is_same and all(map(operator.is_, self.settings.values(), group.values()))
        return is_same and all(each._version == version for each, version in self.versions)

    def note(self, group: Mapping[str, Any]) -> None:
        """Note the settings of a group."""
        self.settings, self.num_parameters = dict(group), len(group["params"])
        plain = pytree.tree_leaves({name: value for name, value in group.items() if name != "params"})
        self.versions = tuple((each, each._version) for each in plain if isinstance(each, torch.Tensor))

    @property
    def reach(self) -> float:
        """Return how much larger a weight can be after the next step; bf16 rounds it, up or down."""
        if self.bound is None:
            return 0.0
        return self.bound.furthest + self.rounding * (self.largest + self.moved)

    @property
    def is_full(self) -> bool:
        """Return whether the bounds of the steps so far, not known to be far off, lead beyond the limit."""
        is_known = self.bound is not None and math.isfinite(self.memory)
        return is_known and not self.largest + self.moved + self.reach <= self.limit

    @property
    def why(self) -> str:
        """Return why it is watched; empty if it is not. `moved` has the next step in it."""
        if self.fault:
            return self.fault
        if not math.isfinite(self.memory):
            return "its state is not finite, or none that steps of this optimizer make"
        if not self.largest + self.moved <= self.limit:
            return f"weights are up to {self.largest:.3g}, steps may add {self.moved:.3g}: proven is {self.limit:.5g}"
        return ""


class UpdateWatch:
    """Decides before each step whether it is watched. All ranks decide alike: they look at the same steps, together.

    Weights and state are looked at before the first step and after `forget`, weights after `forget_weights` too, and
    when the bounds of the steps since may have led to their limit.
    """

    def __init__(self, precision: Precision, optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
        self._precision, self._optimizers, self._ranks = precision, optimizers, ranks
        self._standings: dict[tuple[int, int], _Standing] = {}
        self._policy = precision.policy
        self._stale: dict[str, bool] = {"weights": True, "state": True}
        for each in optimizers:
            if type(each) in ROWS:  # others are watched whatever they have loaded, and a wrapper may take no hooks
                each.register_load_state_dict_post_hook(_Forgets(self._stale))

    def forget(self) -> None:
        """Look at weights, state and settings anew before the next step: something else has set them."""
        self._standings.clear()
        self._stale.update(weights=True, state=True)

    def forget_weights(self) -> None:
        """Look at the weights before the next step."""
        self._stale["weights"] = True

    def watched(self, chosen: Sequence[Optimizer]) -> tuple[Watched, ...]:
        """Return the groups of a step of `chosen` that are not proven; the step is taken for granted to follow."""
        if self._precision.policy is not self._policy:  # exchanged: parameters may be stored in another format
            self._policy = self._precision.policy
            self.forget()
        rows = [(optimizer, index, self._standing(optimizer, index)) for optimizer, index in _groups(chosen)]
        if any(self._stale.values()) or any(standing.is_full for _, _, standing in rows):
            self._look()
        for _, _, standing in rows:
            standing.moved += standing.reach
        return tuple(
            Watched(optimizer=optimizer, index=index, why=why)
            for optimizer, index, standing in rows
            if (why := standing.why)
        )

    def keep(self, chosen: Sequence[Optimizer], watched: Sequence[Watched]) -> KeptStep:
        """Return the step of `chosen` that can be undone."""
        suspects = [each for row in watched for each in row.optimizer.param_groups[row.index]["params"]]
        return KeptStep(self._precision, chosen, suspects, self._agree)

    def _agree(self, is_broken: bool) -> bool:  # noqa: FBT001 one value of a protocol
        return any(row["broken"] for row in self._ranks.gathered({"broken": float(is_broken)}))

    def _standing(self, optimizer: Optimizer, index: int) -> _Standing:
        """Return what is known of a group under its present settings."""
        standing = self._standings.setdefault((id(optimizer), index), _Standing())
        group = optimizer.param_groups[index]
        is_hooked = has_hooks_of_others(optimizer)
        if not standing.is_of(group) or standing.is_hooked is not is_hooked:
            standing.note(group)
            standing.is_hooked = is_hooked
            standing.fault, standing.bound = unproven(optimizer, group), None
            if not standing.fault:
                self._bind(standing, optimizer, index, standing.memory)
        return standing

    def _bind(self, standing: _Standing, optimizer: Optimizer, index: int, memory: float) -> None:
        group = optimizer.param_groups[index]
        standing.bound = bound(optimizer, group, memory)
        standing.memory = standing.bound.memory
        ends = {torch.finfo(each.dtype).max for each in group["params"] if stored(each) is not None}
        standing.limit = min([standing.bound.weights, *ends])  # the fp16 of what is stored low has its own end
        is_low = any(each.dtype == torch.bfloat16 for each in group["params"])
        standing.rounding = 2.0**-7 if is_low else 0.0

    def _look(self) -> None:
        """Look at what is stale, on all ranks, and keep the worst of all."""
        numbers: dict[str, float] = {}
        rows = list(_groups(self._optimizers))
        for number, (optimizer, index) in enumerate(rows):
            standing, group = self._standing(optimizer, index), optimizer.param_groups[index]
            has_proof = standing.bound is not None
            numbers[f"largest {number}"] = _largest(group["params"], standing.limit) if has_proof else math.nan
            state = measured(optimizer, group) if has_proof and self._stale["state"] else None
            numbers[f"memory {number}"] = standing.memory if state is None else float(state)
        gathered = self._ranks.gathered(numbers)
        for number, (optimizer, index) in enumerate(rows):
            standing = self._standing(optimizer, index)
            standing.largest, standing.moved = _worst(row[f"largest {number}"] for row in gathered), 0.0
            memory = _worst(row[f"memory {number}"] for row in gathered)
            if standing.bound is not None and not memory <= standing.memory:
                self._bind(standing, optimizer, index, memory)
        self._stale.update(weights=False, state=False)


class _Forgets:
    """A hook of an optimizer that has loaded a state; it refers to no guard."""

    def __init__(self, stale: dict[str, bool]) -> None:
        self._stale = stale

    def __call__(self, _: Optimizer) -> None:
        self._stale.update(weights=True, state=True)


def _groups(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, int]]:
    for optimizer in optimizers:
        for index in range(len(optimizer.param_groups)):
            yield optimizer, index


def _largest(parameters: Sequence[Any], limit: float) -> float:
    """Return a bound of the largest magnitude, itself where the bound nears `limit`; not a number if one is none.

    Waits for the device.
    """
    local = [each.detach().to_local() if hasattr(each, "to_local") else each.detach() for each in parameters]
    full = [each for each in local if each.numel()]
    if not full:
        return 0.0
    wide = torch.float64 if any(each.dtype == torch.float64 for each in full) else torch.float32
    largest = _max(torch._foreach_norm(full, 2, dtype=wide))  # a tenth of the time of the infinity norm
    return largest if largest <= limit / 2 else _max([end.abs() for each in full for end in torch.aminmax(each)])


def _max(numbers: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([each.to(numbers[0].device, torch.float32) for each in numbers]).max())


def _worst(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return math.nan if any(map(math.isnan, found)) else max(found)
