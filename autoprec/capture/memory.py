"""Memory that a step may write to: copied before, put back afterwards, and copied afresh for every replay."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn

Copies = MutableMapping[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]
"""By the address of a memory block: the block, which is thereby kept alive, and its copy."""


def fresh(value: Any, copies: Copies) -> Any:
    """Return a copy of `value`; tensors that share memory get copies that share memory, by way of `copies`.

    The copy of a tensor that requires grad is a result computed from it: its gradient reaches the original.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if value.requires_grad or value.layout != torch.strided or value.is_conj() or value.is_neg():
        with torch.enable_grad():
            return value.clone()
    block = value.untyped_storage()
    if block._cdata not in copies:
        copies[block._cdata] = (block, block.clone())
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(copies[block._cdata][1], value.storage_offset(), value.shape, value.stride())


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by qualified name; a tied tensor has each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


class Memory:
    """The memory of a model and its batch as it was when a recording began, and what of it the step wrote to.

    Buffers and the batch are copied at once, parameters only when a call is about to write to them, constants when
    they are met first.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        self.named = named_tensors(model)
        self._copies: Copies = {}
        self._written: set[int] = set()
        self._holders: dict[int, list[str]] = {}
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        entries = [entries for module in modules for entries in (module._parameters, module._buffers)]
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]] = [(each, dict(each)) for each in entries]
        self._live: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        self._live_blocks: set[int] = set()
        for name, tensor in self.named.items():
            self.hold(name, tensor)
        for tensor in (*self.named.values(), *inputs):
            self._keep(tensor)
            if not isinstance(tensor, nn.Parameter):
                self.save(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        self._live.append((tensor, tensor.detach(), tensor.requires_grad))
        if tensor.layout == torch.strided:
            self._live_blocks.add(_block(tensor))

    def save(self, tensor: torch.Tensor) -> None:
        """Copy the memory of `tensor`, if it belongs to the model or the batch and is not copied yet."""
        if tensor.layout == torch.strided and _block(tensor) in self._live_blocks:
            fresh(tensor.detach(), self._copies)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that keeps the present value of `tensor`, which came from outside the model."""
        if tensor.requires_grad:
            self._keep(tensor)
        is_live = tensor.layout == torch.strided and _block(tensor) in self._live_blocks
        return tensor if is_live else fresh(tensor.detach(), self._copies)

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Note that the graph's input or attribute `name` holds the memory of `tensor`."""
        if tensor.layout == torch.strided:
            self._holders.setdefault(_block(tensor), []).append(name)

    def mark_written(self, tensor: torch.Tensor) -> bool:
        """Note that the step writes to the memory of `tensor`; return False if it can no longer be put back."""
        if tensor.layout != torch.strided:
            return True
        block = _block(tensor)
        self._written.add(block)
        return block in self._copies or block not in self._live_blocks

    def written(self) -> frozenset[str]:
        """Return the inputs and attributes of the graph whose memory the step wrote to.

        Fused kernels write to running statistics behind autograd's back: what is copied is compared.
        """
        changed = {key for key, (block, copy) in self._copies.items() if not torch.equal(_bytes(block), _bytes(copy))}
        return frozenset(name for key in self._written | changed for name in self._holders.get(key, ()))

    def restore(self) -> None:
        """Give the model and the batch the tensors and the values that they had."""
        for entries, before in self._entries:
            entries.clear()
            entries.update(before)
        for tensor, alias, requires_grad in self._live:
            if tensor.grad_fn is not None and alias.grad_fn is None:
                tensor.detach_()
            if tensor.layout == torch.strided and not tensor.is_set_to(alias):
                tensor.data = alias
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        for key in self._live_blocks & self._copies.keys():
            block, copy = self._copies[key]
            block.copy_(copy)


def _block(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(block: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=block.device).set_(block)
