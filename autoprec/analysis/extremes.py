"""The extremes of what a recorded step starts from: parameters, buffers, constants and the batch."""

import math
from collections.abc import Mapping

import torch

from autoprec.analysis.ranges import Interval
from autoprec.capture import Recording

_FEW = 64  # elements that tell of most tensors that they hold other numbers than integers


def extremes_of(recording: Recording) -> Mapping[str, Interval]:
    """Return the interval from the smallest to the largest element of each tensor, by the names `ranges_of` takes.

    Tensors with a NaN, without elements, and those that are not dense and real have no entry.
    """
    found: dict[str, object] = {}
    inputs = iter(recording.inputs)
    for node in recording.op_graph:
        if node.kind == "input":
            found[node.name] = next(inputs, None)
        elif node.kind in ("parameter", "buffer", "constant"):
            found[node.target] = recording.attribute(node.target)
    return {name: ends for name, value in found.items() if (ends := _interval(value)) is not None}


def _interval(value: object) -> Interval | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return None
    if not value.numel() or value.is_complex() or value.dtype == torch.bool:
        return None
    detached = value.detach()
    low, high = float(detached.amin()), float(detached.amax())
    if math.isnan(low) or math.isnan(high):
        return None
    return Interval(low, high, is_integer=_are_integers(detached), is_number=True, is_tight=True)


def _are_integers(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    first = tensor.reshape(-1)[:_FEW]
    return all(bool((part == part.round()).all()) for part in (first, tensor))
