"""Tensors that were measured already: the same numbers, read again or through a view, are not read twice."""

from typing import TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoprec.analysis.pieces import has_numbers
from autoprec.analysis.tensor_numerics import TensorNumerics, tensor_numerics

_Key: TypeAlias = tuple[int, int, torch.dtype, bool, tuple[tuple[int, int], ...]]


class Seen:
    """Measures tensors, and remembers what it measured for as long as their memory lives and is not written to.

    Keeps no memory alive, only the addresses of its owners from being given to others.
    """

    def __init__(self, formats: tuple[str, ...]) -> None:
        self.formats = formats
        self._known: dict[int, tuple[StorageWeakRef, dict[_Key, TensorNumerics]]] = {}
        self._sweep_at = 64

    def numerics(self, tensor: torch.Tensor) -> TensorNumerics | None:
        """Return the numbers of `tensor`; None for what holds no floating-point numbers."""
        if not has_numbers(tensor):
            return None
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_inference():
            return tensor_numerics(tensor, self.formats)
        storage = tensor.untyped_storage()
        entry = self._known.get(storage._cdata)
        if entry is None:
            self._sweep()
            entry = self._known[storage._cdata] = (StorageWeakRef(storage), {})
        known = entry[1]
        key = _key(tensor)
        if key not in known:
            known[key] = tensor_numerics(tensor, self.formats)
        return known[key]

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget what is known of the memory of `tensor`, which may have been written to behind autograd's back."""
        if tensor.layout == torch.strided and not tensor.is_nested:
            self._known.pop(tensor.untyped_storage()._cdata, None)

    def _sweep(self) -> None:
        """Drop what is known of memory that was freed, so that the table does not outgrow what is alive."""
        if len(self._known) >= self._sweep_at:
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
            self._sweep_at = 2 * len(self._known) + 64


def _key(tensor: torch.Tensor) -> _Key:
    """Return what tells which elements of its memory `tensor` has, in whatever order and shape, at which version."""
    layout: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if layout and stride and layout[-1][0] * layout[-1][1] == stride:
            layout[-1] = (layout[-1][0], layout[-1][1] * size)
        else:
            layout.append((stride, size))
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor._version, int(tensor.storage_offset()), tensor.dtype, is_lazy, tuple(layout)
