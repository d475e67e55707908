"""The weights of convolutions laid out channels last, in place and reversibly."""

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autoprec.errors import ApplyError
from autoprec.policy import MemoryFormat

# By number of dimensions, as `model.to(memory_format=...)` has it.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Every parameter of this process that had another layout once: state of optimizers may still lie so.
_MOVED: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hooks: list[Any] = []


class WeightLayout:
    """The parameters of one model that a policy lays out otherwise than they were.

    A parameter stays the object it is, with its values: only the order of its numbers in memory changes. torch runs a
    convolution channels last where its weight lies so, and what comes out lies so too: inputs need no change.
    """

    def __init__(self, memory_format: MemoryFormat) -> None:
        self.memory_format = memory_format
        self._strides: list[tuple[nn.Parameter, tuple[int, ...]]] = []

    def lay_out(self, model: nn.Module) -> None:
        """Bring the parameters of 4 and 5 dimensions into the layout.

        Raises: `ApplyError` if one of them is sharded: FSDP2 gathers contiguous ones alone.
        """
        if self.memory_format == "as_given":
            return
        able = [(name, p) for name, p in model.named_parameters() if p.dim() in _CHANNELS_LAST]
        for name, parameter in able:
            if hasattr(parameter, "to_local"):
                raise ApplyError(
                    f'apply: the policy has memory_format: channels_last and parameter "{name}" is sharded, and FSDP2 '
                    "gathers contiguous parameters alone; write memory_format: as_given"
                )
        for _, parameter in able:
            found = parameter.stride()
            # Not `contiguous`: of one channel or one pixel it changes no stride, and torch then sees no layout.
            _move(parameter, parameter.data.to(memory_format=_CHANNELS_LAST[parameter.dim()]))
            if parameter.stride() != found:
                self._strides.append((parameter, found))
                _MOVED[parameter] = True
        if self._strides and not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_align))

    def restore(self) -> None:
        """Lay the parameters out as they were found. Idempotent."""
        for parameter, strides in self._strides:
            data = parameter.data
            if data.dim() == len(strides):  # FSDP1 flattens what it takes
                _move(parameter, torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device))
                parameter.data.copy_(data)
        self._strides.clear()

    def copied(self, memo: dict[int, Any]) -> "WeightLayout":
        """Return the layout of a deep copy of the model, whose parameters `memo` has."""
        twin = WeightLayout(self.memory_format)
        twin._strides = [(copy.deepcopy(parameter, memo), strides) for parameter, strides in self._strides]
        _MOVED.update({parameter: True for parameter, _ in twin._strides})
        return twin


def _move(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Have a parameter hold its numbers in the memory of `data`; its gradient, as torch wants it, lies likewise."""
    grad, parameter.grad = parameter.grad, None
    parameter.data = data
    if grad is not None:
        parameter.grad = torch.empty_like(data, dtype=grad.dtype).copy_(grad)


def _align(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Lay state out as its parameter where a fused optimizer steps.

    State comes in another layout from a checkpoint, or from steps before the policy was applied or removed. torch's
    fused kernels of CPUs pair numbers by their place in memory, whatever the strides, and would mix them up.
    """
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter in _MOVED:
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    state[name] = _like(parameter, value)
                if parameter.grad is not None:
                    parameter.grad = _like(parameter, parameter.grad)


def _like(parameter: nn.Parameter, value: Any) -> Any:
    """Return `value`, if it is a tensor of the shape of `parameter`, in its layout."""
    if type(value) is not torch.Tensor or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
