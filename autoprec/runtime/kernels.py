"""What a kernel is to a trace: an aten op as it reached the device, the formats it took and gave, what it did."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch

from autoprec.runtime.dtypes import DTYPES
from autoprec.runtime.matmul_precision import internal_precision

Kind: TypeAlias = Literal["compute", "cast", "move"]

_FORMATS = {dtype: name for name, dtype in DTYPES.items()}

# The node of torch's tree of FP32 precisions that a kernel obeys, by the beginning of its name.
_UNITS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr", "linear"), "matmul"),
        **dict.fromkeys(("_addmm_activation", "mkldnn_linear", "_int_mm"), "matmul"),
        **dict.fromkeys(("_scaled_mm", "_scaled_grouped_mm", "_grouped_mm"), "matmul"),
        **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"), "conv"),
        **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn"), "rnn"),
    }
)
_ATTENTION = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention")

# Kernels that compute nothing: they allocate, fill, copy or draw. Views are told by their schema.
_MOVES = frozenset(
    {
        *("clone", "copy", "contiguous", "_unsafe_view", "detach", "alias", "lift", "lift_fresh", "repeat", "resize"),
        *("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "fill", "zero", "scalar_tensor"),
        *("arange", "eye", "linspace", "rand", "rand_like", "randn", "randn_like", "randint", "randperm", "bernoulli"),
        *("uniform", "normal", "random", "exponential", "set", "_local_scalar_dense", "item", "_pin_memory"),
    }
)

_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_dtensor", "fsdp"})  # libraries of ops that send and gather

# What kernels hand from forward to backward, or from step to step, always in a dtype of their own.
_STATISTICS = frozenset(
    {
        *("running_mean", "running_var", "save_mean", "save_var", "save_invstd", "mean", "rstd", "total_weight"),
        *("logsumexp", "softmax_lse", "workspace", "reserve", "reserveSpace", "saved_mean", "saved_invstd", "norms"),
        *("scale_a", "scale_b"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One aten op that ran.

    `takes` and `gives` are the formats of its floating tensors in order (`float64` and its kind where it is no format
    of ours). `inside` is what torch was set to use inside FP32 matmuls, convolutions or RNNs when it ran; empty for
    other kernels.
    """

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    inside: str = ""

    @property
    def is_matmul(self) -> bool:
        """Return whether the kernel multiplies matrices: a matmul, a convolution, an RNN or attention."""
        return unit_of(self.name) is not None or self.name.startswith(_ATTENTION)

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the formats it computed in, each once: `tf32` where it takes fp32 and reduces it to tf32 inside."""
        reduced = self.inside not in ("", "ieee")
        names = (f"fp32 ({self.inside} inside)" if reduced and name == "fp32" else name for name in self.takes)
        return tuple(dict.fromkeys(names))

    def __str__(self) -> str:
        inside = f" [{self.inside} inside]" if self.inside not in ("", "ieee") else ""
        return f"{self.name}({', '.join(self.takes)}) -> {', '.join(self.gives)}{inside}"


def base_name(func: Any) -> str:
    """Return the name of an aten op without overload and in-place underscore: `aten.add_.Tensor` is `add`."""
    name = func._schema.name.partition("::")[2] if hasattr(func, "_schema") else func.__name__
    return name.rstrip("_") or str(name)


def unit_of(name: str) -> str | None:
    """Return which node of torch's FP32 precisions the kernel `name` obeys; None for one that multiplies nothing."""
    return _UNITS.get(name.removesuffix("_backward"))


def kind_of(func: Any, args: tuple[Any, ...], result: Any) -> Kind:
    """Return whether a kernel computed, changed the dtype of a tensor, or only moved, made or viewed memory."""
    name = base_name(func)
    if name in ("_to_copy", "copy"):
        source = args[0] if name == "_to_copy" else args[1]
        target = result if isinstance(result, torch.Tensor) else args[0]
        return "move" if source.dtype == target.dtype else "cast"
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "compute"
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    is_sent = schema.name.partition("::")[0] in _COMMUNICATION
    return "move" if is_view or is_sent or name in _MOVES or name.endswith("_copy") else "compute"


def kernel_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Kernel:
    """Return what ran; statistics that travel in a dtype of their own are not among what it takes."""
    name = base_name(func)
    floats = list(floats_in(_operands(func, args, kwargs)))
    unit = unit_of(name)
    inside = "" if unit is None or not floats else internal_precision(floats[0].device.type, unit)
    return Kernel(
        name=name,
        takes=tuple(format_name(tensor.dtype) for tensor in floats),
        gives=tuple(format_name(tensor.dtype) for tensor in floats_in((result,))),
        inside=inside,
    )


def format_name(dtype: torch.dtype) -> str:
    """Return the format that a dtype holds; torch's own name where it is none of ours."""
    return _FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def floats_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the floating tensors among `values`, bare or in tuples, lists and mappings."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (tuple, list)):
            yield from floats_in(value)
        elif isinstance(value, dict):
            yield from floats_in(value.values())


def _operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        yield from (*args, *kwargs.values())
        return
    for argument, value in zip(schema.arguments, args, strict=False):
        if argument.name not in _STATISTICS:
            yield value
    yield from (value for name, value in kwargs.items() if name not in _STATISTICS)
