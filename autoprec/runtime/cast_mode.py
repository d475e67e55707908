"""The cast mode: a programmable autocast. Casts the arguments of each site to the format its policy names."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from autoprec.graph.site import LOSS_MODULE
from autoprec.runtime.calls import Call
from autoprec.runtime.site_mode import Frame, SiteMode

# What to do at a site: cast to a dtype, agree on the widest dtype given (PROMOTE), or nothing (None).
PROMOTE = "promote"
Action = torch.dtype | str | None

# Kernels of these families raise on arguments of different dtypes, so an unnamed site of theirs agrees on the widest.
_AGREEING = frozenset({"matmul", "convolution", "attention", "recurrent", "loss", "sampling"})
_AGREEING_OPS = frozenset({"prelu", "cross", "linalg_cross", "embedding_bag"})
_COMPARISONS = frozenset({"isclose", "allclose"})  # no sites, and yet their arguments must agree
_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})


# Where norms take their running statistics, which they write to.
_STATISTICS: Mapping[Any, tuple[int, int]] = {
    F.batch_norm: (1, 2),
    F.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
}


def _agrees(call: Call) -> bool:
    return call.op.family in _AGREEING or call.op.one_dtype or call.op.name in _AGREEING_OPS


def _writes(call: Call, kwargs: Mapping[str, Any]) -> bool:
    return call.writes_first or kwargs.get("inplace") is True


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a torch function: bare, or in tuples and lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds all of `dtypes`: float32 for a mix of float16 and bfloat16."""
    return next(iter(dtypes)) if len(dtypes) == 1 else torch.float32


class CastMode(SiteMode):
    """Casts floating tensor arguments at each site as `action_of(module, op, index)` says.

    Never cast: integer and complex tensors, an argument that is written to, norm parameters and running
    statistics, calls that compute in float64 (the author's explicit choice), calls under `no_grad` inside a module
    that needs gradients, and calls with `out=`.
    """

    def __init__(self, action_of: Callable[[str, str, int], Action]) -> None:
        super().__init__()
        self._action_of = action_of
        self._weights: dict[tuple[int, torch.dtype, bool], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def leave(self) -> None:
        """Give the calls back to the module that owned them before."""
        super().leave()
        if self.frames[-1].module == LOSS_MODULE:
            self.forget_weights()  # an optimizer may step before the next forward, and a fused one leaves no trace

    def forget_weights(self) -> None:
        """Cast every weight anew from here on."""
        self._weights.clear()

    def on_site(self, func: Any, call: Call, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        """Cast what the policy says to cast, and run the call."""
        action = None if frame.leaves_alone() else self._action_of(frame.module, call.op.name, index)
        if action is None and _agrees(call):
            action = PROMOTE
        if action is None and call.op.cast == "first":  # its parameters may be narrower than kernels take beside it
            action = (args[0] if args else kwargs["input"]).dtype
        if action is None or kwargs.get("max_norm") is not None:  # such an embedding writes to its weight
            return func(*args, **kwargs)
        floats = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
        if not floats or any(t.dtype not in _CASTABLE for t in floats):
            return func(*args, **kwargs)
        written = kwargs.get("out") if "out" in kwargs else args[0] if _writes(call, kwargs) else None
        if written is not None:
            return self._call_writing(func, call, written, args, kwargs)
        dtype = widest({t.dtype for t in floats}) if action == PROMOTE else action
        assert isinstance(dtype, torch.dtype)
        if call.op.cast == "first":
            return self._call_norm(func, args, kwargs, dtype)
        return func(*(self._cast(a, dtype) for a in args), **{k: self._cast(v, dtype) for k, v in kwargs.items()})

    def on_other(self, func: Any, call: Call, args: Any, kwargs: Any) -> Any:
        """Run a call without a site; what is assigned to a part of a tensor takes its dtype, mask or no mask."""
        if call.op.name == "setitem" and args[0].dtype in _CASTABLE and isinstance(args[2], torch.Tensor):
            args = (*args[:2], self._cast(args[2], args[0].dtype))
        if call.op.name in _COMPARISONS and args[0].dtype in _CASTABLE and args[1].dtype in _CASTABLE:
            args = (*(self._cast(each, widest({args[0].dtype, args[1].dtype})) for each in args[:2]), *args[2:])
        if call.op.name == "unflatten":  # the method calls super(), which torch.compile does not trace under a mode
            func = torch.unflatten
        return func(*args, **kwargs)

    def _call_writing(self, func: Any, call: Call, written: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that writes to an argument: it computes in that argument's dtype."""
        if not _agrees(call) or not isinstance(written, torch.Tensor) or not written.is_floating_point():
            return func(*args, **kwargs)

        def adapted(value: Any) -> Any:
            return value if value is written else self._cast(value, written.dtype)

        return func(*(adapted(a) for a in args), **{k: adapted(v) for k, v in kwargs.items()})

    def _call_norm(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        """Run a norm: only the activation is cast. Its parameters stay as stored.

        Except where kernels demand more: parameters are not narrower than the activation or the running statistics,
        which matters for parameters stored in a low format.
        """
        activation = args[0] if args else kwargs["input"]
        stored = [t for t in tensors_in((*args[1:], *kwargs.values())) if t is not activation and t.is_floating_point()]
        common = widest({dtype, *(t.dtype for t in stored)})

        statistics = [args[place] for place in _STATISTICS.get(func, ()) if place < len(args)]
        statistics += [kwargs.get("running_mean"), kwargs.get("running_var")]

        def adapted(value: Any) -> Any:
            if value is activation:
                return self._cast(value, dtype)
            return value if any(value is each for each in statistics) else self._cast(value, common)

        return func(*(adapted(a) for a in args), **{k: adapted(v) for k, v in kwargs.items()})

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype == dtype or not value.is_floating_point():
                return value
            # A compiler merges equal casts by itself, and knows what is written in between; it knows no versions.
            if torch.compiler.is_compiling() or not value.is_leaf or not value.requires_grad or value.is_inference():
                return value.to(dtype)
            return self._cast_weight(value, dtype)
        if isinstance(value, (tuple, list)) and any(True for _ in tensors_in(value)):
            parts = [self._cast(part, dtype) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def _cast_weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `weight` in `dtype`, cast once in the life of this mode (one outermost forward).

        The key holds the grad mode, since a cast made under `no_grad` has no way back to its weight; the entry
        holds the weight itself, since an `id` outlives what it points at, and its version, since it can be edited.
        """
        key = (id(weight), dtype, torch.is_grad_enabled())
        entry = self._weights.get(key)
        if entry is not None and entry[0] is weight and entry[1] == weight._version:
            return entry[2]
        cast = weight.to(dtype)
        self._weights[key] = (weight, weight._version, cast)
        return cast
