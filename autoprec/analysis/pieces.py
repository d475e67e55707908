"""Reading the numbers of a tensor in pieces that fit a cache, in any order, with nothing of its size allocated."""

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Elements a piece. On a CPU one should stay in the second-level cache while several operations run over it; on other
# devices each piece costs a wait.
_CPU_PIECE, _DEVICE_PIECE = 1 << 16, 1 << 22

_WIDE = (torch.float32, torch.float64)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` holds floating-point numbers that can be read.

    That is real or complex ones, dense, sparse or nested. Integers, booleans and quantized tensors have no format to
    choose; tensors on `meta` have no values, and what a wrapper such as DTensor holds is not known here.
    """
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not tensor.is_meta and (tensor.is_nested or not is_traceable_wrapper_subclass(tensor))


def pieces_of(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield flat, contiguous tensors in float32 or float64, and how many times each counts.

    Together they are the elements of `tensor` in some order: of a sparse tensor its stored values, of a complex one the
    real and the imaginary parts. An expanded dimension is read once. Narrow dtypes are widened, which is exact.

    Shapes: any; of no elements, nothing is yielded.
    """
    values = _stored(tensor.detach())
    size = _CPU_PIECE if values.is_cpu else _DEVICE_PIECE
    if 0 < values.numel() <= size and values.is_contiguous():  # what small tensors cost is calls
        yield _real(values.view(-1)), 1
        return
    times = 1
    for dim in reversed(range(values.dim())):
        if values.stride(dim) == 0 and values.shape[dim] > 1:
            times *= values.shape[dim]
            values = values.select(dim, 0)
    if values.numel():
        strides = values.stride()
        order = sorted(range(values.dim()), key=lambda dim: -strides[dim])
        for piece in _flat(values.permute(order), size):
            yield _real(piece), times


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dense, strided tensor that holds what `tensor` stores."""
    if tensor.is_nested:
        return tensor.values()
    plain = tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)
    if plain.layout == torch.strided:
        return plain
    if plain.layout == torch.sparse_coo:
        return plain.coalesce().values()
    if plain.layout in _COMPRESSED:
        return plain.values()
    return plain.to_dense()


def _flat(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(size)
    elif tensor.numel() <= size:
        yield tensor.reshape(-1)
    else:
        rows = size * tensor.shape[0] // tensor.numel()
        for part in tensor.split(rows) if rows > 1 else tensor.unbind():
            yield from _flat(part, size)


def _real(piece: torch.Tensor) -> torch.Tensor:
    if piece.dtype in _WIDE and not piece.is_neg():
        return piece
    if piece.is_complex():
        wide = piece if piece.dtype in (torch.complex64, torch.complex128) else piece.to(torch.complex64)
        return torch.view_as_real(wide.resolve_conj()).reshape(-1)
    plain = piece.resolve_neg()
    return plain if plain.dtype in _WIDE else plain.to(torch.float32)
