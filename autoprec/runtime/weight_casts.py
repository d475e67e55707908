"""Casts of weights that are made once an optimizer step, not once a forward, and are never stale."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from autoprec.runtime.edits import watch_for

# A smaller weight is cast anew in each forward: looking whether its cast is still good would cost as much.
SMALLEST = 2**13


# What `.to(dtype)` does, without parsing its many signatures.
CONVERSIONS: Mapping[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {torch.bfloat16: torch.Tensor.bfloat16, torch.float16: torch.Tensor.half, torch.float32: torch.Tensor.float}
)


@dataclass(slots=True, eq=False)  # not frozen: one is made for each large weight, each step, and that takes longer
class _Kept:
    """A cast and what its weight looked like when it was made."""

    weight: torch.Tensor
    cast: torch.Tensor
    version: int
    data_ptr: int

    def is_fresh(self, weight: torch.Tensor, version: int) -> bool:
        """Return whether `weight` is what was cast, and can have been edited by nobody since."""
        return (
            self.weight is weight
            and self.version == version
            and self.data_ptr == weight.data_ptr()
            and self.cast.requires_grad is weight.requires_grad
            and not _is_aliased(weight)
        )


class WeightCasts:
    """The casts of a model's weights that live from one forward to the next, until an optimizer steps.

    So the micro-batches that accumulate a gradient share them. The gradient still flows through the cast once a
    backward pass: what is accumulated is what it would be with a cast for each micro-batch.

    A cast is used again only if its weight cannot have changed: it is the same tensor in the same memory with the same
    version, and is trained or frozen as it was; no optimizer that holds it has stepped; nobody has touched its `.data`;
    and nobody holds an alias of its memory (a flat buffer, a detached tensor, a NumPy array), through which it could be
    written unseen. Weights that FSDP gathers are never kept: it refills their memory unseen, and keeping a copy would
    undo the sharding. Neither is anything kept once the model has run inside a CUDA graph, whose replay runs an
    optimizer without its hooks.
    Code that writes to a weight's memory behind torch's back must call `clear()`.

    A loop that steps after each forward has nothing to share, and pays for keeping in time and memory: after such a
    step only the casts of frozen weights are kept, until a second forward comes before the next one.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._kept: dict[int, dict[torch.dtype, _Kept]] = {}
        self._most = 0  # that many weights are kept before those are dropped that the model holds no longer
        self._captured = False
        self._forwards = 0  # since the last optimizer step
        self._is_shared = True  # whether there was more than one before it; nobody knows before the first
        self._has_frozen = False  # whether a large weight was frozen when an optimizer stepped first
        self._steps_us: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        watch_for(self)

    def __len__(self) -> int:
        return len(self._kept)

    def of_forward(self) -> "WeightCasts | None":
        """Return what the forward that begins now is to take its casts from, None where nobody would share them."""
        self._forwards += torch.is_grad_enabled()
        return self if self._keeps_trained or self._has_frozen else None

    def stepped(self, optimizer: Optimizer, weights: Sequence[torch.Tensor]) -> None:
        """Drop the casts of what `optimizer` has written to, or is about to."""
        self.forget(weights)
        is_ours = self._steps_us.get(optimizer)
        if is_ours is None:
            ours = {id(weight): weight for weight in self._parameters()}
            is_ours = self._steps_us[optimizer] = any(id(weight) in ours for weight in weights)
            self._has_frozen = any(not weight.requires_grad and weight.numel() >= SMALLEST for weight in ours.values())
        if is_ours and self._forwards:
            self._is_shared, self._forwards = self._forwards > 1, 0

    @property
    def _keeps_trained(self) -> bool:
        return self._is_shared or self._forwards > 1

    def cast(self, weight: torch.Tensor, dtype: torch.dtype, version: int) -> torch.Tensor:
        """Return `weight` in `dtype`, from an earlier forward if it is still good; its version is known."""
        formats = self._kept.get(id(weight))
        kept = None if formats is None else formats.get(dtype)
        if kept is not None and kept.is_fresh(weight, version) and not self._is_captured(weight):
            return kept.cast
        cast = to_dtype(weight, dtype)
        if self._may_keep(weight, cast):
            fresh = _Kept(weight, cast, version, weight.data_ptr())
            if formats is None and len(self._kept) >= self._most:
                self._drop_exchanged()
            self._kept.setdefault(id(weight), {})[dtype] = fresh
        return cast

    def clear(self) -> None:
        """Cast every weight anew from here on."""
        self._kept.clear()

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Drop the casts of these weights."""
        if self._kept:
            for weight in weights:
                self._kept.pop(id(weight), None)

    def _drop_exchanged(self) -> None:
        """Drop the casts of weights that are the model's no longer, as `load_state_dict(assign=True)` leaves them."""
        parameters = {id(weight): weight.numel() for weight in self._parameters()}
        self._kept = {key: formats for key, formats in self._kept.items() if key in parameters}
        self._most = max(1, sum(numel >= SMALLEST for numel in parameters.values()))

    def _may_keep(self, weight: torch.Tensor, cast: torch.Tensor) -> bool:
        return (
            type(weight) is nn.Parameter
            and (self._keeps_trained or not weight.requires_grad)
            and not self._is_captured(weight)
            and not cast.is_inference()
            and not torch._C._functorch.is_functorch_wrapped_tensor(cast)
        )

    def _is_captured(self, weight: torch.Tensor) -> bool:
        if not self._captured and weight.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured = True
            self.clear()
        return self._captured


def any_is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Return whether FSDP2 manages the parameters of one of `modules`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules)


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `tensor` in `dtype`, a float that a policy casts to."""
    return CONVERSIONS[dtype](tensor)


def _is_aliased(weight: torch.Tensor) -> bool:
    """Return whether anything besides `weight` holds its memory; the storage object that is asked is the second."""
    return torch._C._storage_Use_Count(weight.untyped_storage()._cdata) > 2
