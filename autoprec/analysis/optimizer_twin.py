"""A second optimizer like the first, on a few elements of every parameter."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.analysis.stored_values import stored_each


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTemplate:
    """An optimizer before its first step, without parameters.

    `layout` lists for each group the indices of the parameters in it, `states` what the optimizer put into their state
    when it was made.
    """

    optimizer: torch.optim.Optimizer
    layout: tuple[tuple[int, ...], ...]
    states: tuple[Mapping[str, Any], ...]


def template_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    sample: Callable[[str, torch.Tensor], torch.Tensor],
) -> OptimizerTemplate:
    """Return the template of an optimizer that has not stepped; `sample` returns the elements that its twins get."""
    index = {id(parameter): place for place, parameter in enumerate(parameters.values())}
    names = list(parameters)
    groups = [[each for each in group["params"] if id(each) in index] for group in optimizer.param_groups]
    return OptimizerTemplate(
        optimizer=_bare(optimizer),
        layout=tuple(tuple(index[id(each)] for each in group) for group in groups),
        states=tuple(
            _joined([(names[index[id(each)]], each, optimizer.state.get(each, {})) for each in group], sample)
            for group in groups
        ),
    )


class Twin:
    """An optimizer that steps on `values`, one flat tensor for each parameter of the template, in `dtype`.

    The values of a group are one parameter to it, which is what makes it fast. An optimizer whose step is not
    elementwise (a norm of the whole tensor, an orthogonalization) does something else to them, or raises: the caller
    compares.
    """

    def __init__(
        self, template: OptimizerTemplate, values: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self.optimizer = _bare(template.optimizer)
        self._layout = template.layout
        self._sizes = [value.numel() for value in values]
        self._values = [value.to(dtype) for value in values]
        self._flat: list[nn.Parameter] = []
        groups = zip(template.layout, template.states, self.optimizer.param_groups, strict=True)
        for indices, state, group in groups:
            flat = nn.Parameter(torch.cat([self._values[index] for index in indices] or [torch.empty(0)]))
            group["params"] = [flat]
            if state:
                self.optimizer.state[flat] = copy.deepcopy(dict(state))
            self._flat.append(flat)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Step once with these gradients, one for each parameter."""
        for indices, flat in zip(self._layout, self._flat, strict=True):
            flat.grad = torch.cat([gradients[index] for index in indices]).to(flat.dtype) if indices else None
        type(self.optimizer).step(self.optimizer)  # not what a scheduler may have put into the instance

    def values(self) -> list[torch.Tensor]:
        """Return a copy of the values, one tensor for each parameter."""
        return self._split([flat.detach() for flat in self._flat], self._values)

    def moment_names(self) -> tuple[str, ...]:
        """Return the names of the parts of the state that have an element for each one of a parameter."""
        return tuple(dict.fromkeys(key for flat in self._flat for key in self._moments(flat)))

    def state(self, key: str) -> dict[int, torch.Tensor]:
        """Return a copy of the state called `key`, by the index of the parameter."""
        empty = torch.empty(0)
        found = [self._moments(flat).get(key, empty) for flat in self._flat]
        held = {index for indices, each in zip(self._layout, found, strict=True) if each.numel() for index in indices}
        split = self._split(found, [empty] * len(self._sizes))
        return {index: split[index] for index in sorted(held)}

    def round_state(self, key: str, format_name: str) -> None:
        """Store the state called `key` in a format and take it back."""
        for indices, flat in zip(self._layout, self._flat, strict=True):
            moment = self._moments(flat).get(key)
            if moment is not None:
                moment.copy_(stored_each(moment, [self._sizes[index] for index in indices], format_name))

    def _moments(self, flat: nn.Parameter) -> dict[str, torch.Tensor]:
        return {
            key: tensor
            for key, tensor in self.optimizer.state.get(flat, {}).items()
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.shape == flat.shape
        }

    def _split(self, flats: Sequence[torch.Tensor], otherwise: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = list(otherwise)
        for indices, flat in zip(self._layout, flats, strict=True):
            if flat.numel():
                parts = flat.split([self._sizes[index] for index in indices])
                for index, part in zip(indices, parts, strict=True):
                    found[index] = part.clone()
        return found


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy with an empty parameter wherever `optimizer` has one, and without state."""
    twin = object.__new__(type(optimizer))
    held = [each for group in optimizer.param_groups for each in group["params"]]
    memo: dict[int, Any] = {id(each): nn.Parameter(torch.empty(0)) for each in held}
    memo[id(optimizer)] = twin
    memo[id(optimizer.state)] = type(optimizer.state)(dict)
    for key, value in vars(optimizer).items():
        if key != "step":
            twin.__dict__[key] = copy.deepcopy(value, memo)
    return twin


def _joined(
    members: Sequence[tuple[str, nn.Parameter, Mapping[str, Any]]],
    sample: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Return the state of a group's flat parameter: moments side by side, the rest from the first member."""
    joined: dict[str, Any] = {}
    for key, first in members[0][2].items() if members else ():
        is_moment = isinstance(first, torch.Tensor) and first.shape == members[0][1].shape and key != "step"
        parts = [sample(name, state[key]) for name, _, state in members if key in state] if is_moment else []
        joined[key] = torch.cat(parts) if is_moment else copy.deepcopy(first)
    return joined
