"""Which ops FP8 kernels can run, and on which shapes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

# Ops that are one product of rows by a matrix, and where that matrix is among their arguments; `linear` has it
# transposed. Products of batches (bmm, matmul of two batches, einsum) are not among them: torch._scaled_mm takes
# matrices alone.
_MATRIX: Mapping[str, int] = MappingProxyType({"linear": 1, "matmul": 1, "mm": 1, "addmm": 2})

FLOAT8_OPS: tuple[str, ...] = tuple(_MATRIX)

_MULTIPLE = 16


def float8_fault(op: str, shapes: Sequence[Sequence[int]]) -> str:
    """Return what keeps FP8 kernels from running a call of `op` on tensors of these shapes, or an empty text.

    The sizes that the layer is made of must be multiples of 16. The number of rows, which varies with the batch, is
    free: rows of zeros fill it up where a kernel sums over it, in the gradient of the weight.
    *Shapes*: those of the call's tensor arguments, in their order.
    *Source*: torch._scaled_mm, its checks of `self.size(1)` and of both sizes of `mat2`, on all three products.
    """
    place = _MATRIX[op]
    rows, matrix = tuple(shapes[place - 1]), tuple(shapes[place])
    if len(matrix) != 2 or not rows:
        return f"{rows} by {matrix}: the second operand must be a matrix, and the first must have rows"
    odd = [size for size in matrix if size % _MULTIPLE]
    return f"{rows} by {matrix}: {' and '.join(map(str, odd))} not a multiple of {_MULTIPLE}" if odd else ""
