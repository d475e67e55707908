"""Plans: what the policy does with the calls of each torch function in each module, worked out once."""

from collections.abc import Callable
from typing import Any

import torch

from autoprec.runtime.calls import Call, describe

# What to do at a site: cast to a dtype, agree on the widest dtype given (PROMOTE), have somebody else run it, nothing.
PROMOTE = "promote"
Executor = Callable[[Any, Call, Any, Any], Any]
Action = torch.dtype | str | Executor | None

# Kernels of these families raise on arguments of different dtypes, so an unnamed site of theirs agrees on the widest.
_AGREEING = frozenset({"matmul", "convolution", "attention", "recurrent"})
# Dtypes that are cast; float64 is the author's explicit choice.
CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
# They run a backward pass: weights may be updated by hooks in it, and what is recomputed in it casts by itself.
BACKWARD = frozenset({"backward", "grad"})


def agrees(call: Call) -> bool:
    """Return whether a call that no rule names needs arguments of one dtype all the same."""
    return call.op.family in _AGREEING or call.op.one_dtype


class Plan:
    """What the policy does with the calls of one torch function in one module.

    `idle` says that there is never anything to do, `dtype` that all floating arguments are cast to it. `action` is None
    where it depends on the index of the site.
    """

    __slots__ = ("action", "by_index", "call", "dtype", "idle")

    def __init__(self, call: Call, action: Action, *, by_index: bool) -> None:
        self.call = call
        self.by_index = by_index
        self.action = PROMOTE if action is None and agrees(call) else action
        is_other = not call.op.is_site and call.op.name != "setitem" and call.op.name not in BACKWARD
        self.idle = call.entered is None and (is_other or (call.op.is_site and not by_index and self.action is None))
        # The common case: every floating argument is cast to this dtype, and none is written to.
        is_plain = call.op.is_site and not by_index and call.op.cast == "all" and not call.writes_first
        self.dtype = action if is_plain and isinstance(action, torch.dtype) else None


class ModulePlans:
    """The sites of one module as the policy sees them: what to do at each, planned when it is first met."""

    __slots__ = ("_action_of", "_depends_on_index", "idle", "path", "plans")

    def __init__(
        self, path: str, action_of: Callable[[str, str, int], Action], depends_on_index: Callable[[str, str], bool]
    ) -> None:
        self.path = path
        self.plans: dict[Any, Plan] = {}
        self.idle: set[Any] = set()
        self._action_of = action_of
        self._depends_on_index = depends_on_index

    def action_of(self, op: str, index: int) -> Action:
        """Return what the policy does at a site of this module."""
        return self._action_of(self.path, op, index)

    def plan(self, func: Any) -> Plan:
        """Plan the calls of `func` in this module."""
        call = describe(func)
        by_index = call.op.is_site and self._depends_on_index(self.path, call.op.name)
        action = None if by_index or not call.op.is_site else self.action_of(call.op.name, 0)
        plan = self.plans[func] = Plan(call, action, by_index=by_index)
        if plan.idle:
            self.idle.add(func)
        return plan
