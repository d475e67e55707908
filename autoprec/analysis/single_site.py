"""Whether a constant that a format cannot hold does harm: the recorded step with one call alone in that format."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoprec.analysis.constants import LostConstant
from autoprec.capture import Recording, Replay
from autoprec.numerics import FORMATS, format_named
from autoprec.runtime.dtypes import torch_dtype

_NOTHING: Mapping[float, float] = MappingProxyType({})


def broken_calls(recording: Recording, lost: Iterable[LostConstant]) -> frozenset[LostConstant]:
    """Return those of the `lost` constants that break the recorded step.

    That is: in FP32 loss and gradients are finite; with the call alone in the low format they are not; and with the
    call in the low format but the constant replaced by the nearest one that serves there, they are finite again.
    A call that the format cannot run at all tells nothing of its constant. Costs up to three steps a constant.
    """
    tried = tuple(lost)
    if not tried or not _is_finite(recording, None, _NOTHING):
        return frozenset()
    return frozenset(each for each in tried if _breaks(recording, each))


def _breaks(recording: Recording, lost: LostConstant) -> bool:
    low, top = format_named(lost.format), FORMATS["fp32"].max
    # The script wrote torch.finfo(x.dtype).min: in a low run that is another number.
    adapted = {top: low.max, -top: -low.max}
    try:
        return not _is_finite(recording, lost, adapted) and _is_finite(
            recording, lost, {**adapted, lost.constant: lost.replacement}
        )
    except (RuntimeError, TypeError):
        return False


def _is_finite(recording: Recording, lost: LostConstant | None, constants: Mapping[float, float]) -> bool:
    """Return whether the replayed step gives a finite loss and finite gradients."""
    parameters = [tensor for tensor in recording.model.parameters() if tensor.requires_grad]
    loss = _LoweredCall(recording, lost, constants).loss()
    gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(loss, parameters, allow_unused=True)
    return all(bool(tensor.isfinite().all()) for tensor in (loss, *gradients) if tensor is not None)


class _LoweredCall(Replay):
    """Runs a recorded step with the call of `lost` in its format; its results return in FP32.

    Among the call's arguments, numbers that are keys of `constants` are exchanged.
    """

    def __init__(self, recording: Recording, lost: LostConstant | None, constants: Mapping[float, float]) -> None:
        super().__init__(recording)
        self.extra_traceback = False
        self._lost, self._constants = lost, constants

    def run_node(self, n: fx.Node) -> Any:
        lost = self._lost
        if lost is None or n.name != lost.node.name:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if lost.by_default and lost.constant in self._constants:
            kwargs = {**kwargs, "eps": lost.constant}
        dtype = torch_dtype(lost.format)
        args, kwargs = pytree.tree_map(lambda value: self._exchanged(_cast(value, dtype)), (args, kwargs))
        result = self.call_function(n.target, args, kwargs)
        return pytree.tree_map(lambda value: _cast(value, torch.float32), result)

    def _exchanged(self, value: Any) -> Any:
        return self._constants.get(value, value) if isinstance(value, float | int) else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
