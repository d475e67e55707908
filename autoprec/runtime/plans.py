"""Plans: what the policy does with the calls of each torch function in each module, worked out once."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from autoprec.ops import Op
from autoprec.runtime.calls import MOST_FUNCTIONS, Call, describe

PROMOTE = "promote"
# What to do at a site: cast to a dtype, agree on the widest dtype given (PROMOTE), nothing, or have an executor run it:
# then it is the name of a format. A name, because torch.compile may keep one in its graph and no callable.
Action = torch.dtype | str | None
SiteKey = tuple[str, str, int]

# Kernels of these families raise on arguments of different dtypes, so an unnamed site of theirs agrees on the widest.
_AGREEING = frozenset({"matmul", "convolution", "attention", "recurrent", "loss", "sampling"})
_AGREEING_OPS = frozenset({"prelu", "cross", "linalg_cross", "embedding_bag", "heaviside", "allclose", "_weight_norm"})
# What has no kernel in a low format, on any device; in bf16; on a CPU. A site of theirs that no rule names computes in
# FP32 there, or else it would raise because what comes before it was lowered.
_WITHOUT_LOW = frozenset(
    {"cdist", "ctc_loss", "nanquantile", "nuclear_norm", "pdist", "polar", "quantile"}
    | {"special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1"}
    | {"special_erfcx", "special_log_ndtr", "special_ndtri", "special_zeta"}
)
_WITHOUT_BF16 = frozenset({"complex", "view_as_complex"})
_WITHOUT_LOW_ON_CPU = frozenset(
    {"avg_pool3d", "multi_margin_loss", "multilabel_margin_loss"} | ({"trace"} if torch.__version__ < "2.13" else set())
)
# Dtypes that are cast; float64 is the author's explicit choice.
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)  # a tuple: torch.compile guards on every look into a set
# They run a backward pass: weights may be updated by hooks in it, and what is recomputed in it casts by itself.
BACKWARD = frozenset({"backward", "grad"})
# No sites, and yet their arguments must agree; those of the latter in FP32.
ALIKE = frozenset({"isclose", "meshgrid", "cartesian_prod", "vander", "linalg_vander"})
ALIKE_IN_FP32 = frozenset({"histogram", "histogramdd", "linalg_vander"})
_MENDED = BACKWARD | ALIKE | ALIKE_IN_FP32 | {"setitem", "unflatten"}  # no sites, but not to be left to themselves
# They refuse a `dtype=` that is narrower than what they are given.
NORMS_THAT_NAME = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"})


class Executor(Protocol):
    """Runs the calls of sites whose format takes more than a cast of the arguments."""

    @property
    def is_emulated(self) -> bool:
        """Return whether it computes the format by emulation, which shows its numerics and not its speed."""

    def __call__(self, func: Any, call: Call, args: Any, kwargs: Any, site: SiteKey) -> Any:
        """Return what the call computes."""


def agrees(call: Call) -> bool:
    """Return whether a call that no rule names needs arguments of one dtype all the same."""
    op = call.op
    return op.family in _AGREEING or op.one_dtype or op.name in _AGREEING_OPS or _lacks_kernels(op)


def needs_fp32(call: Call, dtype: torch.dtype, device: str) -> bool:
    """Return whether no kernel of the call takes `dtype` on this kind of device."""
    op = call.op
    if dtype not in (torch.bfloat16, torch.float16) or not _lacks_kernels(op):
        return False
    if op.family == "fft" or op.name in _WITHOUT_BF16:
        return dtype is torch.bfloat16 or (op.family == "fft" and device == "cpu")
    return device == "cpu" or op.name not in _WITHOUT_LOW_ON_CPU


def _lacks_kernels(op: Op) -> bool:
    if op.family in ("linalg", "fft") or (op.family == "unknown" and op.name.startswith("special_")):
        return True
    return op.name in _WITHOUT_LOW or op.name in _WITHOUT_BF16 or op.name in _WITHOUT_LOW_ON_CPU


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
        untouched = self.action is None and not by_index and call.op.cast != "first"
        self.idle = not call.is_entered and (untouched if call.is_site else call.op.name not in _MENDED)
        # The common case: every floating argument is cast to this dtype, and none is written to.
        is_plain = call.is_site and not by_index and call.op.cast == "all" and not (call.writes_first or call.writes)
        is_plain = is_plain and call.op.name not in NORMS_THAT_NAME
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
        by_index = call.is_site and self._depends_on_index(self.path, call.op.name)
        action = None if by_index or not call.is_site else self.action_of(call.op.name, 0)
        if len(self.plans) >= MOST_FUNCTIONS:
            self.plans.clear()
            self.idle.clear()
        plan = self.plans[func] = Plan(call, action, by_index=by_index)
        if plan.idle:
            self.idle.add(func)
        return plan
