"""Outlier batches, made of a real one by rules that know tensors and nothing of what they mean."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.workload.batches import map_tensors, tensors_of

FACTORS = (4.0, 1e2, 1e4)


@dataclass(frozen=True, kw_only=True)
class StressBatch:
    """A batch out of the ordinary. `factor` is how many times larger its numbers are than real ones; 1: not larger.

    `is_risky`: it may index past the end of a table, which a GPU does not survive.
    """

    name: str
    batch: Any
    factor: float = 1.0
    is_risky: bool = False


def stress_batches(batches: Sequence[Any]) -> Iterator[StressBatch]:
    """Yield the outlier batches that can be made of `batches`; those that would change nothing are left out.

    A tensor is taken for a mask if it is boolean, or has rows and holds nothing but 0 and 1; for tokens if it holds
    integers and has rows. The length is the size of the second dimension of the first tensor that has one.
    """
    real = batches[0]
    tensors = tensors_of(real)
    floats = [tensor for tensor in tensors if _is_number(tensor)]
    if floats:
        yield from _of_numbers(real)
    tokens = [tensor for tensor in tensors if _is_tokens(tensor)]
    if tokens:
        for which, reduce in (("smallest", torch.amin), ("largest", torch.amax)):
            yield StressBatch(name=f"every token the {which} seen", batch=map_tensors(real, _constant(reduce)))
        yield StressBatch(name="one token repeated in each row", batch=map_tensors(real, _repeated))
    yield from _of_masks(real, tensors)
    yield from _of_lengths(batches)
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
    if rows > 1:
        one = map_tensors(real, lambda tensor: tensor[:1] if tensor.dim() and tensor.shape[0] == rows else tensor)
        yield StressBatch(name="batch of one", batch=one, is_risky=True)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and not _is_mask(tensor)


def _is_tokens(tensor: torch.Tensor) -> bool:
    whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    return whole and tensor.dim() > 1 and tensor.numel() > 0 and not _is_mask(tensor)


def _is_mask(tensor: torch.Tensor) -> bool:
    if tensor.dim() < 2 or tensor.numel() == 0 or tensor.is_complex() or tensor.shape[-1] == 1:
        return False
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _of_numbers(real: Any) -> Iterator[StressBatch]:
    for factor in FACTORS:
        yield StressBatch(name=f"inputs times {factor:g}", batch=map_tensors(real, _times(factor)), factor=factor)
        yield StressBatch(
            name=f"one value {factor:g} times the largest", batch=map_tensors(real, _huge(factor)), factor=factor
        )
    yield StressBatch(name="all inputs zero", batch=map_tensors(real, _times(0.0)))
    yield StressBatch(name="all inputs the same", batch=map_tensors(real, _level))


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.detach() * factor) if _is_number(tensor) else tensor.clone()


def _huge(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.detach().clone()
        if _is_number(tensor):
            changed.view(-1)[0] = tensor.abs().max() * factor
        return changed

    return change


def _level(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float(tensor.flatten()[0])) if _is_number(tensor) else tensor.clone()


def _constant(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, int(reduce(tensor))) if _is_tokens(tensor) else tensor.clone()


def _repeated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :1].expand_as(tensor).clone() if _is_tokens(tensor) else tensor.clone()


def _of_masks(real: Any, tensors: Sequence[torch.Tensor]) -> Iterator[StressBatch]:
    """Yield batches whose first row is fully masked; what masks, 0 or 1, nobody can tell, so both are tried."""
    if not any(_is_mask(tensor) for tensor in tensors):
        return
    for value in (0, 1):

        def change(tensor: torch.Tensor, value: int = value) -> torch.Tensor:
            changed = tensor.detach().clone()
            if _is_mask(tensor):
                changed[0] = value
            return changed

        yield StressBatch(name=f"first row of the mask all {value}", batch=map_tensors(real, change))


def _length(batch: Any) -> int:
    return next((tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1), 0)


def _of_lengths(batches: Sequence[Any]) -> Iterator[StressBatch]:
    """Yield a batch of length 1, the longest one, and one twice as long as that."""
    longest = max(batches, key=_length)
    length = _length(longest)
    if length < 2:
        return
    yield StressBatch(
        name="length 1", batch=_resized(longest, length, lambda tensor, dim: tensor.narrow(dim, 0, 1)), is_risky=True
    )
    if length > min(map(_length, batches)):
        yield StressBatch(name=f"the largest length seen, {length}", batch=map_tensors(longest, torch.clone))
    twice = _resized(longest, length, lambda tensor, dim: torch.cat([tensor, tensor], dim))
    yield StressBatch(name=f"twice the largest length, {2 * length}", batch=twice, is_risky=True)


def _resized(batch: Any, length: int, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    def resize(tensor: torch.Tensor) -> torch.Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = change(tensor, dim)
        return tensor.detach().contiguous().clone()

    return map_tensors(batch, resize)
