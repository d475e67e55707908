"""Memory of one training run: parameters, gradients, optimizer state and what is saved for the backward pass."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autoprec.measure.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes one copy of a training run needs.

    `total_bytes` is the peak that CUDA's allocator saw, less what other tenants of the device held; elsewhere it is the
    sum of the others, which is what an allocator without fragmentation would need before the backward pass frees.
    `saved_bytes` counts each storage once and no parameter or buffer; a cast copy of a parameter counts.
    """

    total_bytes: int
    saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def measure_memory(training: Training) -> MemoryUse:
    """Train one step of `training` and return the memory it needs."""
    on_cuda = training.device.type == "cuda"
    before = _start_peak(training) if on_cuda else 0
    saved_bytes = _saved_bytes(training)
    peak = torch.cuda.max_memory_allocated(training.device) if on_cuda else 0
    parameters = list(training.model.parameters())
    parameter_bytes = _unique_bytes([*parameters, *training.model.buffers()])
    gradient_bytes = _unique_bytes(p.grad for p in parameters if p.grad is not None)
    optimizer_bytes = _unique_bytes(_optimizer_tensors(training))
    parts = parameter_bytes + gradient_bytes + optimizer_bytes + saved_bytes
    return MemoryUse(
        total_bytes=peak - before if on_cuda else parts,
        saved_bytes=saved_bytes,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
    )


def _saved_bytes(training: Training) -> int:
    """Run one step and return the bytes it saved for the backward pass."""
    own = {tensor.untyped_storage().data_ptr() for tensor in _own_tensors(training)}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # A saved storage lives until the backward pass, so that its address is not given to another one meanwhile.
        for plain in _plain_tensors(tensor):
            storage = plain.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(note, _as_saved):
        training.step()
    return sum(saved.values())


def _as_saved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _start_peak(training: Training) -> int:
    """Start a new peak and return the bytes that other tenants of the device hold."""
    torch.cuda.synchronize(training.device)
    torch.cuda.reset_peak_memory_stats(training.device)
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    own = _unique_bytes([*_own_tensors(training), *gradients, *_optimizer_tensors(training)], device=training.device)
    return torch.cuda.memory_allocated(training.device) - own


def _own_tensors(training: Training) -> Iterator[torch.Tensor]:
    yield from training.model.parameters()
    yield from training.model.buffers()


def _optimizer_tensors(training: Training) -> list[torch.Tensor]:
    leaves: list[Any] = pytree.tree_leaves([dict(state) for state in training.optimizer.state.values()])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _unique_bytes(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> int:
    """Return the bytes behind `tensors` (on `device` alone, if given), shared storage counted once."""
    storages = {}
    for tensor in tensors:
        for plain in _plain_tensors(tensor):
            if device is None or plain.device.type == device.type:
                storage = plain.untyped_storage()
                storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors a tensor is made of: itself, or the parts of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided else []
