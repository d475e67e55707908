"""Floating-point operations of a call's forward pass, from the shapes in the op graph: two for a multiply and add.

What is not a matrix product, a convolution, attention or a recurrent layer counts zero: memory bounds it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from autoprec.graph.opgraph import OpNode, TensorMeta

Shape: TypeAlias = tuple[int, ...]
_CELLS: Mapping[str, int] = MappingProxyType({"lstm_cell": 2, "gru_cell": 1, "rnn_tanh_cell": 1, "rnn_relu_cell": 1})


def flops_of(node: OpNode) -> int:
    """Return the operations of one forward call; 0 for ops that are not counted.

    Attention counts its whole score matrix, masked or not. A recurrent layer counts its weights at each time step.
    """
    count = _COUNTS.get(node.op)
    operands = _operands(node)
    if count is None or len(operands) < 2 or not node.outputs:
        return 0
    return count(node, operands)


def is_depthwise(node: OpNode) -> bool:
    """Return whether the call is a convolution with one input channel a group, which no matrix unit runs well."""
    operands = _operands(node)
    if not node.op.startswith("conv") or len(operands) < 2:
        return False
    weight = operands[1].shape
    sides = [operands[0].shape, *(node.outputs[0].shape for _ in node.outputs[:1])]
    if len(weight) < 3 or weight[1] != 1 or any(len(shape) < len(weight) - 1 for shape in sides):
        return False
    given, *made = (shape[1 - len(weight)] for shape in sides)
    return given > 1 and ("transpose" not in node.op or made == [given])


def _operands(node: OpNode) -> Sequence[TensorMeta]:
    """Return the floating tensors of a call in their order."""
    return [each for each in node.inputs if each.is_floating]


def _products(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    """Return the count of rows by a matrix, or of batches of matrices: results times what each sums over."""
    return 2 * node.outputs[0].numel * (operands[0].shape[-1] if operands[0].shape else 1)


def _added_products(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    """Return the count of a product that is added to the first operand."""
    return _products(node, operands[1:]) if len(operands) > 2 else 0


def _summed_batches(_: OpNode, operands: Sequence[TensorMeta]) -> int:
    if len(operands) < 3:
        return 0
    return 2 * operands[1].numel * operands[2].shape[-1]


def _contraction(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    """Return the count of a contraction of two tensors without batches: the three sizes follow from the numels."""
    return 2 * math.isqrt(operands[0].numel * operands[1].numel * node.outputs[0].numel)


def _bilinear(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    rows = math.prod(operands[0].shape[:-1])
    return 2 * rows * operands[2].numel + 2 * node.outputs[0].numel * operands[1].shape[-1] if len(operands) > 2 else 0


def _einsum(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    """Return the count of an equation over two tensors, each index once; pairs in turn are not known of three."""
    equation = next((each for each in node.args if isinstance(each, str)), "")
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) != 2 or len(operands) != 2:
        return 0
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in _indices(term, operand.shape):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return 2 * math.prod(sizes.values())


def _indices(term: str, shape: Shape) -> list[tuple[str, int]]:
    """Return the size of each index of a term; dimensions behind an ellipsis are numbered from the last one."""
    head, dots, tail = term.partition("...")
    middle = shape[len(head) : len(shape) - len(tail)] if dots else ()
    names = [*head, *(f"...{len(middle) - place}" for place in range(len(middle))), *tail]
    return list(zip(names, shape, strict=False))


def _convolution(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    weight = operands[1].shape
    return 2 * node.outputs[0].numel * math.prod(weight[1:])


def _transposed(_: OpNode, operands: Sequence[TensorMeta]) -> int:
    return 2 * operands[0].numel * math.prod(operands[1].shape[1:])


def _time_by_channels(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    """Return the count of `conv_tbc`, whose weight is (width, in, out)."""
    return 2 * node.outputs[0].numel * math.prod(operands[1].shape[:2])


def _attention(_: OpNode, operands: Sequence[TensorMeta]) -> int:
    if len(operands) < 3:
        return 0
    query, key, value = (each.shape for each in operands[:3])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(node: OpNode, operands: Sequence[TensorMeta]) -> int:
    rows = operands[0].shape
    first = 1 + _CELLS.get(node.op, 0)
    weights = sum(each.numel for each in operands[first:] if len(each.shape) == 2)
    return 2 * math.prod(rows[:-1]) * weights


_Count: TypeAlias = Callable[[OpNode, Sequence[TensorMeta]], int]
_COUNTS: Mapping[str, _Count] = MappingProxyType(
    {
        **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "linalg_vecdot"), _products),
        **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), _added_products),
        "addbmm": _summed_batches,
        **dict.fromkeys(("inner", "tensordot"), _contraction),
        "bilinear": _bilinear,
        "einsum": _einsum,
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
        **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
        "conv_tbc": _time_by_channels,
        "scaled_dot_product_attention": _attention,
        **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu", *_CELLS), _recurrent),
    }
)
