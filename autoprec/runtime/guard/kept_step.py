"""A step that can be undone: weights and optimizer state as they were before it, bit for bit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

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
        self._precision, self._optimizers, self._suspects, self._agree = precision, optimizers, suspects, agree
        parameters = dict.fromkeys(each for optimizer in optimizers for each in parameters_of(optimizer))
        self._parameters = [(each, each.detach().clone()) for each in parameters]
        self._masters = [
            (record, None if record.master is None else record.master.detach().clone())
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
        states: list[tuple[torch.Tensor, torch.Tensor]] = []
        owners: list[torch.Tensor] = []
        for optimizer, before in zip(self._optimizers, self._states, strict=True):
            for parameter in self._suspects:
                kept = before.get(parameter)
                now = optimizer.state.get(parameter) if kept is not None else None
                if now is not None and kept is not None:
                    pairs = [
                        (value, kept[name]) for name, value in now.items() if _is_real(value) and _is_real(kept.get(name))
                    ]
                    states += pairs
                    owners += [parameter] * len(pairs)
        values = [*self._suspects, *(value for value, _ in states)]
        if _all_finite(values):
            return None
        for parameter in self._suspects:
            if number := _num_broken(parameter):
                return self._named(parameter, number)
        for parameter, (value, kept) in zip(owners, states, strict=True):
            if (number := _num_broken(value)) and not _num_broken(kept):
                return self._named(parameter, number)
        return None

    def _named(self, parameter: torch.Tensor, number: int) -> Undone:
        names = {each: name for name, each in self._precision.model.named_parameters()}
        return Undone(parameter=names.get(parameter, "a parameter that is none of the model's"), num_elements=number)  # type: ignore[call-overload]

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
    return pytree.tree_map(lambda each: each.detach().clone() if isinstance(each, torch.Tensor) else each, value)


def _put_back(now: Any, kept: Any) -> Any:
    """Return `kept`, in the tensors that hold its place now where they can: others may hold these as well."""
    if isinstance(kept, Mapping) and isinstance(now, Mapping):
        return {name: _put_back(now.get(name), value) for name, value in kept.items()}
    if type(now) is torch.Tensor and isinstance(kept, torch.Tensor) and now.shape == kept.shape:
        if now.dtype == kept.dtype and now.device == kept.device:
            return now.copy_(kept)
    return kept


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _local(tensor: Any) -> torch.Tensor:
    """Return the shard of this rank, and quantized state (of torchao) as numbers."""
    local: Any = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    found: torch.Tensor = local.dequantize() if type(local) is not torch.Tensor else local
    return found


def _all_finite(values: Sequence[torch.Tensor]) -> bool:
    """Return whether all are surely finite, by one sum a tensor and one wait for the device."""
    if not values:
        return True
    sums = [_local(each).sum(dtype=torch.float32) for each in values]
    return bool(torch.isfinite(torch.stack([each.to(sums[0].device) for each in sums])).all())


def _num_broken(value: torch.Tensor) -> int:
    return int((~torch.isfinite(_local(value))).sum())
