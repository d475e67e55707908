"""Whether what ranges say of a recorded step holds when the step is replayed."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autoprec.analysis.ranges import Interval
from autoprec.capture import Recording


def violations(recording: Recording, ranges: Mapping[str, Interval]) -> list[str]:
    """Return a line for each node of a replay with an element that its interval denies."""
    found: list[str] = []

    def visit(node: fx.Node, value: Any) -> None:
        for tensor in _tensors(value):
            found.extend(f"{node.name}: {fault}" for fault in _faults(tensor, ranges[node.name]))

    recording.replay(visit)
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.numel() and not value.is_complex() and value.layout == torch.strided:
            yield value.detach().double()
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _faults(tensor: torch.Tensor, interval: Interval) -> Iterator[str]:
    numbers = tensor[~tensor.isnan()]
    if interval.is_number and len(numbers) < tensor.numel():
        yield f"a NaN, although {interval}"
    if len(numbers) == 0:
        return
    low, high = numbers.min().item(), numbers.max().item()
    if low < interval.lo or interval.hi < high:
        yield f"{low} to {high} is not in {interval}"
    if interval.is_integer and not torch.equal(numbers, numbers.round()):
        yield f"no integers, although {interval}"
    if interval.is_tight and abs(high - interval.hi) + abs(low - interval.lo) > 1e-2 * interval.magnitude:
        yield f"{low} to {high} does not reach the ends of {interval}"
