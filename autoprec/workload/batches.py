"""Batches of any make on the device: moved, materialized, and checked to be the same every time."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from autoprec.errors import AutoprecError, WorkloadError, a_or_an
from autoprec.workload.origin import origin
from autoprec.workload.workload import Workload

if TYPE_CHECKING:
    import torch


_USED_UP = (
    "batches() returned the same iterator again, which is used up; it must return a new iterable every time it is "
    "called, as a generator function does"
)


def to_device(batch: Any, device: "torch.device | str") -> Any:
    """Return `batch` with every tensor in it on `device`; the batch itself is left as it is.

    Tuples, named tuples, lists, mappings (Hugging Face's too), dataclasses (frozen ones too), objects with a method
    `to`, and what torch's pytree knows are rebuilt with their type; anything else is passed through. Tensors that are
    on the device already are shared with the batch.
    """
    return _mapped(batch, lambda tensor: tensor.to(device), lambda leaf: _moved(leaf, device))


def map_tensors(batch: Any, change: "Callable[[torch.Tensor], torch.Tensor]") -> Any:
    """Return `batch` rebuilt with `change` of every tensor in it; the batch itself is left as it is."""
    return _mapped(batch, change, copy.deepcopy)


def load_batches(workload: Workload, count: int, device: "torch.device | str") -> tuple[Any, ...]:
    """Return the first `count` batches of the workload on `device`, as copies that belong to the caller.

    `batches()` is called again whenever it runs out (a new epoch), and at least twice: every call must begin with the
    same batch, bit for bit.

    Raises: `WorkloadError` if `batches()` raises, is no iterable, is empty, cannot be started again, or differs.
    """
    seen: list[Any] = []
    loaded = _started(workload, count, device, seen)
    first = copied(loaded[0], "cpu")
    while True:
        stream = epoch_of(workload, seen)
        batch = next(stream)
        _check_same(first, batch)
        loaded += [copied(each, device) for each in islice(chain([batch], stream), count - len(loaded))]
        if len(loaded) == count:
            return tuple(loaded)


def first_batches(workload: Workload, count: int, device: "torch.device | str") -> tuple[Any, ...]:
    """Return what `load_batches` does, but no batch twice: fewer if one call of `batches()` gives fewer."""
    seen: list[Any] = []
    loaded = _started(workload, count, device, seen)
    _check_same(copied(loaded[0], "cpu"), next(epoch_of(workload, seen)))
    return tuple(loaded)


def _started(workload: Workload, count: int, device: "torch.device | str", seen: list[Any]) -> list[Any]:
    if count < 1:
        raise WorkloadError(f"cannot load {count} batches; ask for at least 1")
    return [copied(batch, device) for batch in islice(epoch_of(workload, seen), count)]


def epoch_of(workload: Workload, seen: list[Any]) -> Iterator[Any]:
    """Yield the batches of one call of `batches()`; there is at least one. `seen` collects what it returned.

    Raises: `WorkloadError` as `load_batches` does.
    """
    if not callable(workload.batches):
        raise WorkloadError(
            f"batches is {a_or_an(workload.batches)}; it must be a function without arguments that returns a "
            f"new iterable of batches, the same ones every time"
        )
    is_empty = True
    try:
        epoch: Any = workload.batches()
        if not isinstance(epoch, Iterable):
            raise WorkloadError(
                f"batches() returned {a_or_an(epoch)}; it must return an iterable of batches, such as a list, "
                f"a data loader or a generator"
            )
        if isinstance(epoch, Iterator) and any(epoch is earlier for earlier in seen):
            raise WorkloadError(_USED_UP)
        seen.append(epoch)
        for batch in epoch:
            is_empty = False
            yield batch
    except AutoprecError:
        raise
    except Exception as error:
        where = origin(error)
        raise WorkloadError(
            f"{where + ': ' if where else ''}batches() raised {type(error).__name__}: {error}"
        ) from error
    if is_empty and len(seen) == 1:
        raise WorkloadError("batches() returned an empty iterable; it must yield at least one batch")
    if is_empty:
        raise WorkloadError(
            "batches() yielded nothing when it was called again; it must yield the same batches every time it is "
            "called: does it share an iterator, or a flag, between calls?"
        )


def _check_same(first: Any, again: Any) -> None:
    difference = _difference(first, again)
    if difference:
        raise WorkloadError(
            f"batches() begins with another batch when it is called again ({difference}); every run must see the same "
            "batches in the same order: return a new iterable each time, and give shuffling and augmentation a seeded "
            "generator that batches() itself makes, as in "
            "DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0))"
        )


def _difference(first: Any, again: Any) -> str:
    """Return what differs between the tensors of two batches, or an empty string."""
    ours, theirs = tensors_of(first), tensors_of(again)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, then {len(theirs)}"
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"tensor {index}: {_kind(one)}, then {_kind(other)}"
        if not same_bits(one, other.detach().to("cpu")):
            return f"tensor {index}, {_kind(one)}, has other values"
    return ""


def _kind(tensor: "torch.Tensor") -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def same_bits(one: "torch.Tensor", other: "torch.Tensor") -> bool:
    """Return whether two tensors hold the same bytes; NaN equals NaN, and -0 differs from 0."""
    import torch

    if one.layout != torch.strided or other.layout != torch.strided:
        return bool(torch.equal(one.to_dense(), other.to_dense()))
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*as_bytes)


def tensors_of(batch: Any) -> "list[torch.Tensor]":
    """Return the tensors of a batch, in the order they are met."""
    found: list[torch.Tensor] = []

    def note(tensor: "torch.Tensor") -> "torch.Tensor":
        found.append(tensor)
        return tensor

    _mapped(batch, note, lambda leaf: leaf)
    return found


def copied(batch: Any, device: "torch.device | str") -> Any:
    """Return a copy of `batch` on `device` that shares nothing with it."""

    def copied_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return _mapped(batch, copied_tensor, lambda leaf: _moved(copy.deepcopy(leaf), device))


def _moved(leaf: Any, device: "torch.device | str") -> Any:
    move = getattr(leaf, "to", None)
    return move(device) if callable(move) and not isinstance(leaf, type) else leaf


def _mapped(value: Any, of_tensor: "Callable[[torch.Tensor], torch.Tensor]", of_leaf: Callable[[Any], Any]) -> Any:
    """Return `value` rebuilt with `of_tensor` of each tensor in it and `of_leaf` of what is no container."""
    import torch
    from torch.utils import _pytree as pytree

    def mapped(item: Any) -> Any:
        return _mapped(item, of_tensor, of_leaf)

    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):  # its batch sizes must stay on the CPU
        moving = ("data", "sorted_indices", "unsorted_indices")
        return value._replace(**{name: mapped(getattr(value, name)) for name in moving})
    if isinstance(value, Mapping):
        return _mapped_mapping(value, mapped)
    if isinstance(value, tuple | list):
        kind: Any = type(value)
        return kind(*map(mapped, value)) if hasattr(value, "_fields") else kind(map(mapped, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapped_dataclass(value, mapped)
    children, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    if len(children) == 1 and children[0] is value:
        return of_leaf(value)
    return pytree.tree_unflatten([mapped(child) for child in children], spec)


def _mapped_mapping(value: Mapping[Any, Any], mapped: Callable[[Any], Any]) -> Any:
    if not isinstance(value, MutableMapping):
        kind: Any = type(value)
        return kind({key: mapped(item) for key, item in value.items()})
    rebuilt = copy.copy(value)
    for key in list(value):
        rebuilt[key] = mapped(value[key])
    return rebuilt


def _mapped_dataclass(value: Any, mapped: Callable[[Any], Any]) -> Any:
    """Return a copy with mapped fields, made without `__init__` and its checks: the values are only moved."""
    rebuilt = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(rebuilt, field.name, mapped(getattr(value, field.name)))
    return rebuilt
