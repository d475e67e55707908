"""The op graph as pattern matchers walk it: operands seen through movement, their intervals, and where values go."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoprec.analysis.ranges import TOP, Interval
from autoprec.analysis.ranges.interval import point
from autoprec.graph.opgraph import OpGraph, OpNode, Ref
from autoprec.ops import lookup


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops that hand numbers on as they are: other shapes, parts, copies, other dtypes.
MOVES = _words(
    "view view_as reshape reshape_as permute transpose t adjoint movedim swapaxes narrow select split "
    "split_with_sizes tensor_split hsplit vsplit dsplit chunk unbind unsqueeze squeeze flatten unflatten ravel "
    "expand expand_as broadcast_to diagonal atleast_1d atleast_2d atleast_3d detach contiguous clone to float "
    "half bfloat16 double type type_as cpu cuda repeat tile roll flip getitem get index_select "
    "repeat_interleave"
)
_ARITHMETIC = _words(
    "add sub mul div neg clamp clamp_min clamp_max floor round remainder floor_divide where masked_fill cat stack"
)
_INDICES = frozenset({"long", "int"})
_ANGLES = frozenset({"sin", "cos", "polar"})
_SCORES = frozenset({"softmax", "log_softmax", "scaled_dot_product_attention", "sigmoid", "exp"})
_COUNTS = frozenset({"arange", "linspace", "cumsum"})
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "outer", "einsum", "pow", "reciprocal"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarded:
    """A value and what protects it: the calls that add or clamp to `eps`."""

    value: OpNode | None
    guards: tuple[OpNode, ...] = ()
    eps: float = 0.0


class Walk:
    """A graph with the ranges of its nodes; everything it answers was found in a few passes over the graph."""

    def __init__(self, op_graph: OpGraph, ranges: Mapping[str, Interval], device_kind: str) -> None:
        self.graph = op_graph
        self.ranges = ranges
        self.device_kind = device_kind
        self._origins = _origins(op_graph)
        self.is_index = _leads_to(op_graph, _is_index_cast, MOVES | _ARITHMETIC)
        self.is_phase = _leads_to(op_graph, lambda node: node.op in _ANGLES, MOVES | _ARITHMETIC | _PRODUCTS)
        self.is_score = _leads_to(op_graph, lambda node: node.op in _SCORES, MOVES | _ARITHMETIC)
        self.is_position = _positions(op_graph)
        self.chains = chains_of(self)

    def operand(self, node: OpNode, place: int, name: str = "other") -> OpNode | None:
        """Return the call or source that an argument comes from, seen through movement; None for numbers."""
        return self.origin(_given(node, place, name))

    def origin(self, value: Any) -> OpNode | None:
        """Return the node that what `value` refers to was moved from."""
        return self.graph[self._origins[value.name]] if isinstance(value, Ref) else None

    def operands(self, node: OpNode) -> tuple[OpNode | None, OpNode | None]:
        """Return what the two operands of a call come from."""
        return self.operand(node, 0, "input"), self.operand(node, 1)

    def interval(self, node: OpNode, place: int, name: str = "other") -> Interval:
        """Return the interval of an argument."""
        value = _given(node, place, name)
        if isinstance(value, Ref):
            return self.ranges.get(value.name, TOP)
        return point(float(value)) if isinstance(value, int | float) else TOP

    def number(self, node: OpNode, place: int, name: str = "other") -> float | None:
        """Return an argument that is one number: given as such, or a tensor all of whose elements are equal."""
        value = _given(node, place, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        interval = self.interval(node, place, name)
        return interval.hi if isinstance(value, Ref) and interval.is_single and interval.is_finite else None

    def shape(self, node: OpNode, place: int, name: str = "other") -> tuple[int, ...]:
        """Return the shape of an argument; the empty one for numbers and where it is not known."""
        value = _given(node, place, name)
        outputs = self.graph[value.name].outputs if isinstance(value, Ref) else ()
        return outputs[0].shape if len(outputs) == 1 else ()

    def unguarded(self, node: OpNode | None) -> Guarded:
        """Return what `node` protects by a small constant or a clamp, seen through both."""
        guards: list[OpNode] = []
        eps = 0.0
        while node is not None and len(guards) < 3:
            number = self._guard(node)
            if number is None:
                break
            guards.append(node)
            eps = max(eps, number)
            left, right = self.operands(node)
            node = left if left is not None else right
        return Guarded(value=node, guards=tuple(guards), eps=eps)

    def _guard(self, node: OpNode) -> float | None:
        """Return the number that `node` adds or clamps to; None if it does neither."""
        if node.op in ("clamp", "clamp_min", "clamp_max"):
            return max(self.number(node, 1, "min") or 0.0, 0.0)
        if node.op == "add":
            small = self.number(node, 1) if isinstance(_given(node, 0, "input"), Ref) else self.number(node, 0)
            return small if small is not None and 0 <= small <= _LARGEST_EPS else None
        return None

    def squared(self, node: OpNode | None) -> OpNode | None:
        """Return what `node` is the square of; None if it is no square."""
        if node is None:
            return None
        if node.op == "square" or (node.op == "pow" and self.number(node, 1, "exponent") == 2):
            return self.operand(node, 0, "input")
        left, right = self.operands(node)
        return left if node.op == "mul" and left is not None and left is right else None

    def averaged(self, node: OpNode | None) -> OpNode | None:
        """Return what `node` averages: by a mean, a sum over a constant, pooling, or a fixed window; else None."""
        if node is None:
            return None
        if node.op == "mean" or "avg_pool" in node.op:
            return self.operand(node, 0, "input")
        if node.op.startswith("conv"):
            window = self.operand(node, 1, "weight")
            is_fixed = window is not None and window.kind in ("buffer", "constant")
            return self.operand(node, 0, "input") if is_fixed else None
        if node.op in ("div", "mul") and self.number(node, 1) is not None:
            total = self.operand(node, 0, "input")
            return self.operand(total, 0, "input") if total is not None and total.op == "sum" else None
        return None


_LARGEST_EPS = 1e-2


def _given(node: OpNode, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def num_reduced(node: OpNode) -> int:
    """Return how many elements of the first input one element of the result is made of."""
    num_out = node.outputs[0].numel if node.outputs else 0
    return node.inputs[0].numel // num_out if node.inputs and num_out else 1


def contraction(node: OpNode) -> int:
    """Return how many products one element of a matrix product sums."""
    shape = node.inputs[0].shape if node.inputs else ()
    if node.op != "einsum":
        return shape[-1] if shape else 1
    num_in = math.prod(meta.numel for meta in node.inputs)
    num_out = max(node.outputs[0].numel, 1)
    return max(round(math.sqrt(num_in / num_out)), 1)  # exact without dimensions of a batch


def _origins(op_graph: OpGraph) -> dict[str, str]:
    origins: dict[str, str] = {}
    for node in op_graph:
        first = node.args[0] if node.op in MOVES and node.args else None
        origins[node.name] = origins[first.name] if isinstance(first, Ref) else node.name
    return origins


def _is_index_cast(node: OpNode) -> bool:
    """Return whether a call turns floating numbers into integers."""
    is_cast = node.op in _INDICES or (node.op in ("to", "type") and "int64" in (*node.args, *node.kwargs.values()))
    return is_cast and any(meta.is_floating for meta in node.inputs)


def _leads_to(op_graph: OpGraph, ends: Callable[[OpNode], bool], passes: frozenset[str]) -> frozenset[str]:
    """Return the nodes from which a path through ops that `passes` names leads to a node for which `ends` holds."""
    found: set[str] = set()
    nodes: Sequence[OpNode] = tuple(op_graph)
    for node in reversed(nodes):
        for successor in op_graph.digraph.successors(node.name):
            after = op_graph[successor]
            if ends(after) or (after.op in passes and successor in found):
                found.add(node.name)
                break
    return frozenset(found)


def _positions(op_graph: OpGraph) -> frozenset[str]:
    """Return the nodes that are counted, or computed from counts and stored numbers alone."""
    found: set[str] = set()
    fixed: set[str] = set()
    for node in op_graph:
        sources = list(op_graph.digraph.predecessors(node.name))
        if node.kind in ("parameter", "buffer", "constant") or (node.kind == "op" and not sources):
            fixed.add(node.name)
        if node.op in _COUNTS:
            found.add(node.name)
        elif node.op in MOVES | _ARITHMETIC | _PRODUCTS | {"long"} and sources:
            counted = [name for name in sources if name in found]
            if counted and all(name in found or name in fixed for name in sources):
                found.add(node.name)
            elif all(name in fixed for name in sources):
                fixed.add(node.name)
    return frozenset(found)


def lowered(nodes: Sequence[OpNode | None]) -> Iterator[OpNode]:
    """Yield those of `nodes` that a policy may run low, once each."""
    seen: set[str] = set()
    for node in nodes:
        if node is None or node.site is None or not node.is_castable or node.name in seen:
            continue
        if lookup(node.op).is_site and any(meta.is_floating for meta in node.outputs):
            seen.add(node.name)
            yield node


def chains_of(walk: Walk) -> dict[str, tuple[int, str]]:
    """Return for each call of a recurrence `state = decay * state + input` its number of steps and its last call.

    A step is an addition one of whose terms is a product with the result of the step before.
    """
    depth: dict[str, int] = {}
    before: dict[str, tuple[str, str]] = {}
    for node in walk.graph:
        previous = _step_before(walk, node) if node.op == "add" else None
        if previous is not None:
            product, state = previous
            depth[node.name] = depth.get(state.name, 0) + 1
            before[node.name] = (product.name, state.name)
    longest: dict[str, tuple[int, str]] = {}
    for name in reversed(before):
        chain = max(longest.get(name, (0, "")), (depth[name], name))
        for each in (name, *before[name]):
            longest[each] = max(longest.get(each, (0, "")), chain)
    return longest


def _step_before(walk: Walk, node: OpNode) -> tuple[OpNode, OpNode] | None:
    """Return the product and the sum before it that an addition continues."""
    for product in walk.operands(node):
        if product is None or product.op != "mul":
            continue
        for state in walk.operands(product):
            if state is not None and state.op == "add":
                return product, state
    return None
