"""The cast mode: a programmable autocast. Casts the arguments of each site to the format its policy names."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoprec.runtime.calls import Call
from autoprec.runtime.site_mode import Frame, SiteMode

# What to do at a site: cast to a dtype, agree on the widest dtype given (PROMOTE), or nothing (None).
PROMOTE = "promote"
Action = torch.dtype | str | None

# Kernels of these families raise on arguments of different dtypes, so an unnamed site of theirs agrees on the widest.
_AGREEING = frozenset({"matmul", "convolution", "attention", "recurrent"})
_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})


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

    def on_site(self, func: Any, call: Call, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        """Cast what the policy says to cast, and run the call."""
        action = self._action_of(frame.module, call.op.name, index)
        if action is None and (call.op.family in _AGREEING or call.op.one_dtype):
            action = PROMOTE
        if action is None or frame.leaves_alone() or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        floats = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
        if not floats or any(t.dtype not in _CASTABLE for t in floats):
            return func(*args, **kwargs)
        if call.writes_first or kwargs.get("inplace") is True:
            return self._call_in_place(func, call, args, kwargs)
        dtype = widest({t.dtype for t in floats}) if action == PROMOTE else action
        assert isinstance(dtype, torch.dtype)
        if call.op.cast == "first":
            return self._call_norm(func, args, kwargs, dtype)
        return func(*(self._cast(a, dtype) for a in args), **{k: self._cast(v, dtype) for k, v in kwargs.items()})

    def _call_in_place(self, func: Any, call: Call, args: Any, kwargs: Any) -> Any:
        """Run a call that writes to its first argument: it computes in that argument's dtype."""
        if not (call.op.family in _AGREEING or call.op.one_dtype) or not args[0].is_floating_point():
            return func(*args, **kwargs)
        dtype = args[0].dtype
        rest = (self._cast(a, dtype) for a in args[1:])
        return func(args[0], *rest, **{k: self._cast(v, dtype) for k, v in kwargs.items()})

    def _call_norm(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        """Run a norm: only the activation is cast. Its parameters stay as stored.

        Except where kernels demand more: parameters are not narrower than the activation or the running statistics,
        which matters for parameters stored in a low format.
        """
        activation = args[0] if args else kwargs["input"]
        stored = [t for t in tensors_in((*args[1:], *kwargs.values())) if t is not activation and t.is_floating_point()]
        common = widest({dtype, *(t.dtype for t in stored)})

        def adapted(value: Any) -> Any:
            if value is activation:
                return self._cast(value, dtype)
            return self._cast(value, common) if isinstance(value, nn.Parameter) else value

        return func(*(adapted(a) for a in args), **{k: adapted(v) for k, v in kwargs.items()})

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype == dtype or not value.is_floating_point():
                return value
            if value.is_leaf and value.requires_grad:
                return self._cast_weight(value, dtype)
            return value.to(dtype)
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
