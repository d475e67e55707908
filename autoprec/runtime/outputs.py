"""Casting the floating tensors in whatever a module takes or returns."""

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Return `tree` with its fp16, bf16 and fp32 tensors in `dtype`; `tree` itself if none of them changes.

    Looks into everything torch's pytree knows, dataclasses and mappings; their copies are shallow.
    """
    if isinstance(tree, Tensor):  # the usual case, in short
        return _cast_leaf(tree, dtype)
    leaves, spec = pytree.tree_flatten(tree)
    cast = [_cast_leaf(leaf, dtype) for leaf in leaves]
    if all(new is old for new, old in zip(cast, leaves, strict=True)):
        return tree
    return pytree.tree_unflatten(cast, spec)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.dtype in _CASTABLE else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    elif isinstance(leaf, MutableMapping):
        parts = dict(leaf)
    else:
        return leaf
    changed = {key: new for key, old in parts.items() if (new := cast_floats(old, dtype)) is not old}
    if not changed:
        return leaf
    twin = copy.copy(leaf)
    for key, new in changed.items():
        if isinstance(twin, MutableMapping):
            twin[key] = new
        else:
            object.__setattr__(twin, key, new)  # frozen dataclasses too: the copy is ours
    return twin
