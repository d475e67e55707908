"""The extremes of what a recorded step starts from: parameters, buffers, constants and the batch."""

from collections.abc import Mapping

import torch

from autoprec.capture import Recording


def extremes_of(recording: Recording) -> Mapping[str, tuple[float, float]]:
    """Return the smallest and the largest element of each tensor, by the names that `ranges_of` takes.

    Tensors with a NaN, without elements, and those that are not dense and real have no entry.
    """
    found = {}
    inputs = iter(recording.inputs)
    for node in recording.op_graph:
        if node.kind == "input":
            found[node.name] = next(inputs, None)
        elif node.kind in ("parameter", "buffer", "constant"):
            found[node.target] = _attribute(recording.graph_module, node.target)
    return {name: ends for name, value in found.items() if (ends := _ends(value)) is not None}


def _attribute(root: object, target: str) -> object:
    for part in target.split("."):
        root = getattr(root, part, None)
    return root


def _ends(value: object) -> tuple[float, float] | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return None
    if not value.numel() or value.is_complex() or value.dtype == torch.bool:
        return None
    detached = value.detach()
    low, high = (end.item() for end in (detached.amin(), detached.amax()))
    return None if low != low or high != high else (float(low), float(high))  # noqa: PLR0124 a NaN
