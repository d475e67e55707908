"""Small facts read off a running call: its tensors, its Python numbers, its source line, a digest of its result."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STANDARD_LIBRARY = str(Path(sys.modules["contextlib"].__file__ or "").parent)


def tensors_in_tree(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and slices."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in_tree(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in_tree(part)
    elif isinstance(value, slice):
        yield from tensors_in_tree((value.start, value.stop, value.step))


def scalars_in(value: Any) -> Iterator[float]:
    """Yield the Python floats and integers in nested tuples, lists and dicts; booleans are flags, not numbers."""
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for part in value:
            yield from scalars_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from scalars_in(part)


def source_line() -> str:
    """Return `file:line` of the innermost running code that belongs neither to torch nor to autoprec."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        if not standard and not file.startswith((*_INSIDE, "<")):
            return f"{file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def digest(tensor: torch.Tensor) -> int:
    """Return a hash of the bits of `tensor`: equal tensors give equal digests."""
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    raw = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense.resolve_neg()
    flat = raw.contiguous().view(-1)
    if flat.numel() == 0:
        return 0
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.int64)
    bits = flat.view(torch.uint8).view(flat.numel(), -1).to(torch.int64)
    scale = 256 ** torch.arange(bits.shape[1], device=flat.device, dtype=torch.int64)
    return int(((bits * scale).sum(1) * weights).sum())
