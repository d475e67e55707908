"""Specialised forwards of torch's leaf modules: what the cast mode would do in them, without its detours.

A Linear between two other calls is the most common thing there is in a model. Its one site needs no mode to be found:
the input and the weights are cast, and the kernel is called with torch functions switched off. Whatever is not plain
(a subclass, a parametrization, a tensor subclass, another mode on the stack, torch.compile) takes the general way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._C import _len_torch_function_stack as num_modes
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn import functional as F

from autoprec.runtime.compiled import ASKS, not_compiled_alone, traced_as
from autoprec.runtime.forwards import LEAF, as_replacement
from autoprec.runtime.graph_guards import guard_by_method
from autoprec.runtime.norms import norms_need_one_dtype
from autoprec.runtime.plans import CASTABLE, Action
from autoprec.runtime.running import RUNNING
from autoprec.runtime.weight_casts import CONVERSIONS, SMALLEST

# Each has one site: the op of this name, called once in a forward, on the input and what the module holds.
_WEIGHTED: Mapping[type[nn.Module], str] = MappingProxyType(
    {nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}
)
_UNARY: Mapping[type[nn.Module], str] = MappingProxyType(
    {
        nn.Identity: "",
        nn.ReLU: "relu",
        nn.ReLU6: "hardtanh",
        nn.LeakyReLU: "leaky_relu",
        nn.ELU: "elu",
        nn.GELU: "gelu",
        nn.SiLU: "silu",
        nn.Mish: "mish",
        nn.Tanh: "tanh",
        nn.Sigmoid: "sigmoid",
        nn.Hardswish: "hardswish",
        nn.Softplus: "softplus",
        nn.Softmax: "softmax",
        nn.LogSoftmax: "log_softmax",
        nn.Dropout: "dropout",
        nn.LayerNorm: "layer_norm",
        nn.RMSNorm: "rms_norm",
        nn.GroupNorm: "group_norm",
        nn.BatchNorm1d: "batch_norm",
        nn.BatchNorm2d: "batch_norm",
        nn.BatchNorm3d: "batch_norm",
        nn.MaxPool2d: "max_pool2d",
        nn.AvgPool2d: "avg_pool2d",
    }
)

# What these call in the end: two frames of Python less, where one of them costs more than the kernel.
_KERNELS: Mapping[type[nn.Module], Callable[[Tensor], Tensor]] = MappingProxyType(
    {nn.ReLU: torch.relu, nn.SiLU: torch._C._nn.silu, nn.Tanh: torch.tanh, nn.Sigmoid: torch.sigmoid}
)

_ELSEWHERE = torch.empty(0, dtype=torch.int8)  # stands for a parameter that a hook computes, as weight_norm has it

_LOW = (torch.bfloat16, torch.float16)
_NORMS = frozenset({nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d})


@dataclass(frozen=True, eq=False)
class Leaf:
    """What a leaf module knows, where its forward is one for all that do the same.

    `whole` is the general forward, to which the short one leaves what is not plain. A deep copy of the module has this
    very object: it runs in modes of the same owner.
    """

    owner: Any
    path: str
    original: Callable[..., Any]
    whole: Callable[..., Any]

    def __deepcopy__(self, _: object) -> "Leaf":
        return self


def leaf_forward(module: nn.Module, owner: Any, action_of: Callable[[str], Action]) -> Callable[..., Any] | None:
    """Return a forward in short for `module`, or None if only the general one is right for it.

    `owner` is whose modes it serves; `action_of(op)` is what the policy does at the op's first call in this module.
    Leaves that do the same share one forward, kept in `owner.short_forwards`: it stays in the caches of the processor,
    where one for each would be fetched anew for each.
    """
    kind = type(module)
    if "forward" in module.__dict__:
        return None
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return None  # such a convolution pads first, which is a site of its own
    op = _WEIGHTED.get(kind) or _UNARY.get(kind)
    if op is None or (kind in _NORMS and not {"weight", "bias"}.isdisjoint(module.__dict__)):
        return None  # no leaf, or a parameter that a hook computes
    action = action_of(op) if op else None
    if not isinstance(action, torch.dtype) and (action is not None or kind in _WEIGHTED):
        return None
    is_large = kind in _WEIGHTED and module.weight.numel() >= SMALLEST  # type: ignore[operator]
    short: dict[Any, Callable[..., Any]] = owner.short_forwards
    key = (kind, action, is_large)
    if key not in short:
        made = _weighted(short, kind, action, is_large=is_large) if kind in _WEIGHTED else _unary(short, kind, action)
        short[key] = as_replacement(traced_as(_traced, but_within=True)(made), kind.forward)
    return short[key]


def _weighted(served: Any, kind: Any, dtype: Any, *, is_large: bool) -> Callable[..., Any]:  # noqa: C901
    """Return the forward of a Linear or a convolution; every helper it does not call is a microsecond less."""
    is_linear, convert = kind is nn.Linear, CONVERSIONS[dtype]

    def forward(self: Any, input: Tensor) -> Any:  # noqa: A002 as in torch
        if ASKS and is_dynamo_compiling():
            return _traced(self, input)
        mode = RUNNING.mode
        if (
            mode is not None
            and mode.shortens is served
            and type(self) is kind
            and type(input) is Tensor
            and num_modes() == 1
        ):
            held = self._parameters
            weight: Any = held.get("weight")
            bias: Any = held.get("bias")
            if type(weight) is Parameter and (bias is None or type(bias) is Parameter):
                with DisableTorchFunction():  # first of all: with the mode on, input.dtype alone costs microseconds
                    found, stored = input.dtype, weight.dtype
                    x = input if found is dtype else convert(input) if found in CASTABLE else None
                    if x is None or (bias is not None and bias.dtype is not stored):
                        pass  # float64 is the author's explicit choice
                    elif stored is dtype:
                        return F.linear(x, weight, bias) if is_linear else self._conv_forward(x, weight, bias)
                    elif stored in CASTABLE:
                        try:
                            version, bias_version = weight._version, 0 if bias is None else bias._version
                        except RuntimeError:  # inference tensors have none
                            version = bias_version = -1
                        if version >= 0:
                            casts = mode.casts[dtype]
                            w: Any = weight
                            b: Any = bias
                            if (key := id(w)) in casts or (is_large and mode.kept_casts is not None):
                                w = mode.cast_weight(w, dtype)
                            else:
                                casts[key] = (w, version, w := convert(w))
                            if b is not None:
                                if (key := id(b)) in casts:
                                    b = mode.cast_weight(b, dtype)
                                else:
                                    casts[key] = (b, bias_version, b := convert(b))
                            return F.linear(x, w, b) if is_linear else self._conv_forward(x, w, b)
        return self.__dict__[LEAF].whole(self, input)

    return forward


def _unary(served: Any, kind: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return the forward of a module whose one op casts its input alone, or nothing."""
    original = kind.forward
    names = () if kind not in _NORMS else ("weight",) if kind is nn.RMSNorm else ("weight", "bias")
    convert, kernel = None if dtype is None else CONVERSIONS[dtype], _KERNELS.get(kind)

    def forward(self: Any, input: Tensor) -> Any:  # noqa: A002 as in torch
        if ASKS and is_dynamo_compiling():
            return _traced(self, input)
        mode = RUNNING.mode
        if (
            mode is not None
            and mode.shortens is served
            and type(self) is kind
            and type(input) is Tensor
            and num_modes() == 1
            and (not (inplace := self.__dict__.get("inplace")) or dtype is None)
        ):
            with DisableTorchFunction():
                x: Tensor | None = input
                if convert is not None and (found := input.dtype) is not dtype:
                    x = convert(input) if found in CASTABLE else None  # float64 is the author's explicit choice
                if x is not None and (not names or _is_stored_in_fp32(self, names)):
                    return original(self, x) if kernel is None or inplace else kernel(x)
        return self.__dict__[LEAF].whole(self, input)

    return forward


def _traced(module: Any, input: Tensor) -> Any:  # noqa: A002 as in torch
    """Return what torch.compile traces in place of a short forward: the original one in a frame of the module."""
    leaf = getattr(module, LEAF)
    mode = RUNNING.mode
    if mode is not None and mode.owner is leaf.owner:
        guard_by_method()
        mode.enter(leaf.path)
        try:
            return leaf.original(module, input)
        finally:
            mode.leave()
    with leaf.owner.frame(leaf.path):
        return leaf.original(module, input)


@not_compiled_alone
def _is_stored_in_fp32(norm: nn.Module, parameters: tuple[str, ...]) -> bool:
    """Return whether parameters and statistics of a norm need no cast beside an activation of any format."""
    if norms_need_one_dtype():
        return False
    for name in parameters:
        value = norm._parameters.get(name, _ELSEWHERE)
        if value is not None and value.dtype is not torch.float32:
            return False
    return all(value is None or value.dtype not in _LOW for value in norm._buffers.values())
