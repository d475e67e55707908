"""A second optimizer like the first, on other tensors: what it does to them is what the first does, element by element."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Twin:
    """A copy of `optimizer` that steps on `values` in place of `parameters`, which are those of `optimizer`.

    An optimizer whose step is not elementwise (a norm of the whole tensor, an orthogonalization) does something else to
    a sample of a tensor than to the tensor: the caller compares. `optimizer` must not have stepped yet, or share
    nothing with the values if it has.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]
    ) -> None:
        self.values = tuple(nn.Parameter(value.clone()) for value in values)
        self.optimizer = _copied(optimizer, dict(zip(parameters, self.values, strict=True)))

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Step once with these gradients; a parameter without one stays out of it."""
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = None if gradient is None else gradient.to(value.dtype).clone()
        type(self.optimizer).step(self.optimizer)  # not what a scheduler may have put into the instance

    def moments(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors of state that have an element for each one of value `index`, by the optimizer's name."""
        state = self.optimizer.state.get(self.values[index], {})
        return {
            key: tensor
            for key, tensor in state.items()
            if key != "step" and isinstance(tensor, torch.Tensor) and _matches(tensor, self.values[index])
        }


def _matches(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.shape == value.shape


def _copied(
    optimizer: torch.optim.Optimizer, stand_ins: dict[nn.Parameter, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return a copy that has `stand_ins` wherever `optimizer` has parameters, and everything else copied.

    A parameter without stand-in becomes an empty one.
    """
    twin = object.__new__(type(optimizer))
    held = [each for group in optimizer.param_groups for each in group["params"]]
    memo: dict[int, Any] = {id(each): nn.Parameter(torch.empty(0)) for each in held}
    memo.update({id(old): new for old, new in stand_ins.items()})
    memo[id(optimizer)] = twin
    for key, value in vars(optimizer).items():
        if key != "step":
            twin.__dict__[key] = copy.deepcopy(value, memo)
    return twin
