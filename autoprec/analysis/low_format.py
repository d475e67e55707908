"""A low format as a recorded step runs in it.

Which kernels run is a choice of its own. `ideal` ones round the operands, compute in FP32, and round the result and the
gradients: what the format costs anywhere. `device` ones are those of this device, whose faults are part of what is
looked for; but matmuls, convolutions, attention and recurrent layers stay ideal where the device has no units for the
format, since units accumulate in FP32, and what stands in for them may be a hundred times slower.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from autoprec.graph.opgraph import OpNode
from autoprec.ops import FLOAT8_OPS, float8_fault, lookup
from autoprec.policy import FLOAT8
from autoprec.runtime.device import emulated_formats
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.float8 import Float8Matmul, float8_product
from autoprec.runtime.plans import Action, Executor

Kernels: TypeAlias = Literal["device", "ideal"]

_IDEAL = "ideal"
_UNITS = frozenset({"matmul", "convolution", "attention", "recurrent"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Ideal:
    """Runs a call in FP32 on operands rounded to `dtype`, and rounds what it returns; gradients are rounded alike."""

    dtype: torch.dtype

    @property
    def is_emulated(self) -> bool:
        """Return True."""
        return True

    def __call__(self, func: Any, call: Any, args: Any, kwargs: Any, site: Any) -> Any:  # noqa: ARG002
        """Return what the call computes. Of a norm, only the first argument is rounded."""
        if call.op.cast == "first":
            args = (self._rounded(args[0]), *args[1:]) if args else args
            kwargs = {**kwargs, **({"input": self._rounded(kwargs["input"])} if "input" in kwargs else {})}
        else:
            args, kwargs = pytree.tree_map(self._rounded, (args, kwargs))
        return pytree.tree_map(self._low, func(*args, **kwargs))

    def _rounded(self, value: Any) -> Any:
        return value.to(self.dtype).to(torch.float32) if _is_castable(value) else value

    def _low(self, value: Any) -> Any:
        return value.to(self.dtype) if _is_castable(value) else value


def _is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, eq=False)
class LowFormat:
    """A low format, and what it takes to run sites in it on a device."""

    name: str
    kernels: Kernels
    has_units: bool
    executors: Mapping[str, Executor]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that holds its numbers."""
        return torch_dtype(self.name)

    def action(self, node: OpNode) -> Action:
        """Return how a low call runs."""
        if self.name == FLOAT8:
            return FLOAT8
        ideal = self.kernels == "ideal" or (not self.has_units and lookup(node.op).family in _UNITS)
        return _IDEAL if ideal else self.dtype

    def can_run(self, node: OpNode) -> bool:
        """Return whether the call can run in the format at all."""
        if not node.is_castable or self.name != FLOAT8:
            return node.is_castable
        return node.op in FLOAT8_OPS and not float8_fault(node.op, [tensor.shape for tensor in node.inputs])


def low_format(name: str, device: str, native: Collection[str], kernels: Kernels = "device") -> LowFormat:
    """Return what it takes to run sites in a format on a device of kind `device`, which has units for `native`."""
    executors: dict[str, Executor] = {}
    if name == FLOAT8:
        emulated = kernels == "ideal" or FLOAT8 in emulated_formats(device)
        executors[FLOAT8] = Float8Matmul(product=float8_product("tensorwise", emulated=emulated))
    else:
        executors[_IDEAL] = Ideal(dtype=torch_dtype(name))
    return LowFormat(name=name, kernels=kernels, has_units=name in native, executors=executors)
