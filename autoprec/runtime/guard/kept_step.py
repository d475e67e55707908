"""A step that can be undone: weights and optimizer state as they were before it, bit for bit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoprec.runtime.guard.tensor_copies import copy_of
from autoprec.runtime.precision import Precision
from autoprec.runtime.scaled_gradients import parameters_of
from autoprec.runtime.step import Undone
from autoprec.runtime.stored import stored


class KeptStep:
    """What the optimizers of a step hold before it: parameters, masters, state, and what their groups say.

    `undo_if_broken` is called after the step and looks at `suspects`, the parameters whose updates are not proven to be
    finite. `agree` tells whether any rank found something: all ranks undo a step, or none does.
    """

    def __init__(
        self,
        precision: Precision,
        optimizers: Sequence[torch.optim.Optimizer],
        suspects: Sequence[torch.Tensor],
        agree: Callable[[bool], bool],
    ) -> None:
        self._precision, self._optimizers = precision, optimizers
        self._suspects, self._agree = dict.fromkeys(suspects), agree
        parameters = dict.fromkeys(each for optimizer in optimizers for each in parameters_of(optimizer))
        self._parameters = [(each, copy_of(each)) for each in parameters]
        self._masters = [
            (record, None if record.master is None else copy_of(record.master))
            for each in parameters
            if (record := stored(each)) is not None
        ]
        self._generators = precision.storage.generators.state()
        self._states = [{key: _copied(value) for key, value in each.state.items()} for each in optimizers]
        self._groups = [
            [_copied({name: value for name, value in group.items() if name != "params"}) for group in each.param_groups]
            for each in optimizers
        ]

    def undo_if_broken(self) -> Undone | None:
        """Undo the step if it left a suspect, or what the optimizer remembers of it, not finite; say which, and how.

        State that was not finite before, and what the step made that was not there, is left to its optimizer.
        """
        found = self._broken()
        if not self._agree(found is not None):
            return None
        self._undo()
        return found or Undone(parameter="a parameter of another rank", num_elements=0)

    def _broken(self) -> Undone | None:
        pairs = [(each, each, kept) for each, kept in self._parameters if each in self._suspects]
        for optimizer, before in zip(self._optimizers, self._states, strict=True):
            for parameter in self._suspects:
                now, kept = optimizer.state.get(parameter, {}), before.get(parameter, {})
                pairs += [(parameter, now[name], kept[name]) for name in kept if _are_real(now.get(name), kept[name])]
        if _all_finite([now for _, now, _ in pairs]):
            return None
        for parameter, now, kept in pairs:
            number = int((~torch.isfinite(_local(now)) & torch.isfinite(_local(kept))).sum())
            if number:
                return Undone(parameter=self._name_of(parameter), num_elements=number)
        return None

    def _name_of(self, parameter: torch.Tensor) -> str:
        named = self._precision.model.named_parameters()
        return next((name for name, each in named if each is parameter), "a parameter that is none of the model's")

    @torch.no_grad()
    def _undo(self) -> None:
        for parameter, kept in self._parameters:
            parameter.copy_(kept)
        for record, master in self._masters:
            if master is None:
                record.master = None
            elif record.master is not None:
                record.master.copy_(master)
        self._precision.storage.generators.load(self._generators)
        for optimizer, states, groups in zip(self._optimizers, self._states, self._groups, strict=True):
            for key in [each for each in optimizer.state if each not in states]:
                del optimizer.state[key]
            for key, state in states.items():
                optimizer.state[key] = _put_back(optimizer.state.get(key), state)
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                for name, value in kept.items():
                    group[name] = _put_back(group.get(name), value)


def _copied(value: Any) -> Any:
    """Return `value` with copies of its tensors, in dicts, lists and tuples of their own; the rest as it is."""
    return pytree.tree_map(lambda each: copy_of(each) if isinstance(each, torch.Tensor) else each, value)


def _put_back(now: Any, kept: Any) -> Any:
    """Return `kept`, in the tensors that hold its place now where they can: others may hold these as well."""
    if isinstance(kept, Mapping) and isinstance(now, Mapping):
        return {name: _put_back(now.get(name), value) for name, value in kept.items()}
    if type(now) is not torch.Tensor or type(kept) is not torch.Tensor:
        return kept
    is_alike = (now.shape, now.dtype, now.device) == (kept.shape, kept.dtype, kept.device)
    return now.copy_(kept) if is_alike else kept


def _are_real(now: Any, kept: Any) -> bool:
    return all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (now, kept))


def _local(tensor: Any) -> torch.Tensor:
    """Return the shard of this rank, and quantized state (of torchao) and complex numbers as real ones."""
    local: Any = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    found: torch.Tensor = local.dequantize() if type(local) is not torch.Tensor else local
    return torch.view_as_real(found) if found.is_complex() else found


def _all_finite(values: Sequence[torch.Tensor]) -> bool:
    """Return whether all are surely finite, by one sum a tensor and one wait for the device."""
    if not values:
        return True
    sums = [_local(each).sum(dtype=torch.float32) for each in values]
    return bool(torch.isfinite(torch.stack([each.to(sums[0].device) for each in sums])).all())
