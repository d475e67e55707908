"""Which of its arguments a call writes to, known before it runs, and which call wrote to a tensor's memory last."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoprec.capture.facts import tensors_in_tree
from autoprec.runtime.calls import Call


def written_arguments(call: Call, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors whose values the call replaces, in place or by an assignment such as `x.data = y`.

    Fused kernels that keep statistics (batch norm) do not tell; for their buffers, values are compared.
    """
    yield from tensors_in_tree(kwargs.get("out"))
    if call.op.name == "requires_grad":
        return
    for place, name in call.writes:
        yield from tensors_in_tree(args[place] if place < len(args) else kwargs.get(name))
    if call.writes_first or kwargs.get("inplace") is True:
        yield from tensors_in_tree(args[0] if args else kwargs.get("input"))
    elif call.op.name == "set" and call.property_name == "data":
        yield args[0]
    elif kwargs.get("max_norm") is not None:  # an embedding that shortens its rows first
        yield from tensors_in_tree((args[1:2], kwargs.get("weight")))


def made_to_require_grad(call: Call, args: Any) -> Iterator[torch.Tensor]:
    """Yield the tensor that the call makes a leaf of the autograd graph; a parameter is one."""
    if call.op.name == "requires_grad" or (call.op.name == "set" and call.property_name == "requires_grad"):
        yield from (each for each in args[:1] if not each.requires_grad and not isinstance(each, nn.Parameter))


class Writers:
    """The last call that wrote to each block of memory; later readers of older tensors come after it."""

    def __init__(self) -> None:
        self._writers: dict[int, tuple[StorageWeakRef, fx.Node]] = {}

    def note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Note that `node` wrote to the memory of `tensor`."""
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._writers[storage._cdata] = (StorageWeakRef(storage), node)

    def before(self, tensor: torch.Tensor, holder: fx.Node | None) -> fx.Node | None:
        """Return the last writer of the memory of `tensor`, if only memory tells that it changed.

        That is: `holder`, the node that returned `tensor`, is older.
        """
        if not self._writers or tensor.layout != torch.strided:
            return None
        reference, writer = self._writers.get(tensor.untyped_storage()._cdata, (None, None))
        if reference is None or writer is None or reference.expired() or holder is writer:
            return None
        is_older = holder is None or holder.meta.get("order", 0) < writer.meta["order"]
        return writer if is_older else None
