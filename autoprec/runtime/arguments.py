"""What is among the arguments of a torch function, as casting needs to know it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autoprec.runtime.calls import Call

_WIDEST = torch.float32
_FLAGS = frozenset({bool, int, float, str, torch.dtype})
# Such an embedding writes to its weight, or has a sparse gradient, which no cast passes on.
_WRITING = frozenset({"inplace", "max_norm", "sparse"})


def writes_first(call: Call, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call writes to its first argument."""
    return call.writes_first or kwargs.get("inplace") is True


def are_flags(kwargs: Mapping[str, Any]) -> bool:
    """Return whether nothing among `kwargs` is a tensor, or says that the call is none to cast like any other."""
    for name, value in kwargs.items():
        if not (value is None or type(value) in _FLAGS) or (name in _WRITING and value):
            return False
    return True


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a torch function: bare, or in tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds all of `dtypes`: float32 for a mix of float16 and bfloat16."""
    return next(iter(dtypes)) if len(dtypes) == 1 else _WIDEST
