"""Norms: only the activation is cast, and the rest is as wide as kernels demand beside it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, no_grad
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from autoprec.runtime.arguments import tensors_in, widest

# Where norms take their running statistics, and whether to write to them.
_STATISTICS: Mapping[Any, tuple[int, int]] = {
    F.batch_norm: (1, 2),
    F.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
}
_WRITES = 5

_TRANSFORMS = (torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Jvp)


def norms_need_one_dtype() -> bool:
    """Return whether a norm is differentiated forward or batched now: torch's rules for that take one dtype."""
    if is_dynamo_compiling():
        return False
    transforms = torch._C._functorch.get_interpreter_stack() or ()  # None where there is none
    return forward_ad._current_level >= 0 or any(each.key() in _TRANSFORMS for each in transforms)


def call_norm(
    cast: Callable[[Any, torch.dtype], Any], func: Any, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Any:
    """Run a norm whose activation is cast to `dtype` by `cast`. Its parameters and statistics stay as stored.

    Except where kernels demand more: parameters are not narrower than the activation or the running statistics, and
    statistics that are narrower than the rest are updated in a wider copy. Which matters for what is stored low.
    """
    activation = args[0] if args else kwargs["input"]
    statistics = _statistics_in(func, args, kwargs)
    stored = [t for t in tensors_in((*args[1:], *kwargs.values())) if t is not activation and t.is_floating_point()]
    common = widest({dtype, *(t.dtype for t in stored)})
    # Where one dtype is needed, a norm is what its kernel is inside: in the wider dtype on the rounded activation, and
    # rounded at the end.
    is_split = common is not dtype and norms_need_one_dtype()
    wider = {id(each): each.to(common) for each in statistics if each.dtype is not common}

    def adapted(value: Any) -> Any:
        if value is activation:
            return cast(cast(value, dtype), common) if is_split else cast(value, dtype)
        if any(value is each for each in statistics):
            return wider.get(id(value), value)
        return cast(value, common)

    result = func(*(adapted(a) for a in args), **{k: adapted(v) for k, v in kwargs.items()})
    if wider and _writes(func, args, kwargs):
        with no_grad():
            for each in statistics:
                each.copy_(wider.get(id(each), each))
    return cast(result, dtype) if is_split and isinstance(result, Tensor) else result


def _statistics_in(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the running statistics among the arguments of a norm."""
    found = [args[place] for place in _STATISTICS.get(func, ()) if place < len(args)]
    found += [kwargs.get("running_mean"), kwargs.get("running_var")]
    return [each for each in found if each is not None]


def _writes(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a norm updates its running statistics."""
    if len(args) > _WRITES:
        return bool(args[_WRITES])
    return bool(kwargs.get("training", kwargs.get("use_input_stats", func is F.instance_norm)))
