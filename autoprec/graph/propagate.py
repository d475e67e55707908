"""Which ops of a graph run low and which stay FP32, from their numerics classes alone.

Source: TensorFlow, tensorflow/core/grappler/optimizers/auto_mixed_precision.cc, `AutoMixedPrecisionImpl::Optimize`.
Of its six passes four are translated, under the numbers they have there: pass 1 `AddAllowlistOps`,
pass 2 `PropagateDenyFwdThroughClearAndInfer`, pass 3 `AddClearAndInferToAllowIfBetweenAllow` and
pass 5 `PropagateAllowThroughClear`. Pass 4 (infer ops that merely follow an allow op) belongs to its bf16 mode for
oneDNN and pass 6 to ops without a low kernel, which here is a question for the device. New here is only that every
FP32 node remembers the deny op that made it so.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import networkx as nx

NumericsClass: TypeAlias = Literal["allow", "infer", "deny", "clear"]
Color: TypeAlias = Literal["low", "fp32"]
_Neighbors: TypeAlias = Callable[[str], Iterable[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paint:
    """The color of one node, and the deny op it was painted FP32 for.

    `origin` is the node's own name if it is a deny op, the nearest deny op upstream if that contaminated it, and
    empty for every other node. `distance` counts the edges from `origin` to the node.
    """

    color: Color
    origin: str = ""
    distance: int = 0


def paint(digraph: "nx.DiGraph[str]", classes: Mapping[str, NumericsClass]) -> dict[str, Paint]:
    """Return the paint of every node in `classes`, in the order of `digraph`.

    Nodes without a class (parameters, inputs, integer ops) carry no color and stop every pass.
    Visits each node and each edge a bounded number of times.
    """
    upstream = _clear_before_deny_or_infer(digraph, classes)
    contaminated = _contaminate(digraph, classes, upstream)
    low = _paint_low(digraph, classes, contaminated)
    return {
        name: Paint(color="fp32", origin=contaminated[name][0], distance=contaminated[name][1])
        if name in contaminated
        else Paint(color="low" if name in low else "fp32")
        for name in digraph
        if name in classes
    }


def _clear_before_deny_or_infer(digraph: "nx.DiGraph[str]", classes: Mapping[str, NumericsClass]) -> frozenset[str]:
    """Return deny and infer nodes, and the clear nodes that lead to one through clear nodes (pass 2, first half)."""
    roots = [name for name in digraph if classes.get(name) in ("deny", "infer")]
    return _reach(roots, digraph.predecessors, lambda name: classes.get(name) == "clear")


def _contaminate(
    digraph: "nx.DiGraph[str]", classes: Mapping[str, NumericsClass], upstream: frozenset[str]
) -> dict[str, tuple[str, int]]:
    """Return each FP32-bound node with its nearest deny op and the distance to it (pass 2, second half).

    Breadth first from all deny ops at once; of two equally near ones the one that ran first is named.
    """
    origin = {name: (name, 0) for name in digraph if classes.get(name) == "deny"}
    queue = deque(origin)
    while queue:
        name = queue.popleft()
        source, distance = origin[name]
        for successor in digraph.successors(name):
            if successor in upstream and successor not in origin:
                origin[successor] = (source, distance + 1)
                queue.append(successor)
    return origin


def _paint_low(
    digraph: "nx.DiGraph[str]", classes: Mapping[str, NumericsClass], contaminated: Mapping[str, object]
) -> frozenset[str]:
    """Return the nodes that run low (passes 1, 3 and 5)."""
    allow = [name for name in digraph if classes.get(name) == "allow"]
    follows = ("clear", "infer")
    downstream = _reach(
        allow, digraph.successors, lambda name: classes.get(name) in follows and name not in contaminated
    )
    between = _reach(allow, digraph.predecessors, lambda name: name in downstream)

    def both_ways(name: str) -> Iterable[str]:
        yield from digraph.predecessors(name)
        yield from digraph.successors(name)

    return _reach(between, both_ways, lambda name: classes.get(name) == "clear" and name not in contaminated)


def _reach(roots: Iterable[str], neighbors: _Neighbors, enter: Callable[[str], bool]) -> frozenset[str]:
    """Return `roots` and every node that a path through nodes that may be entered leads to."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        for neighbor in neighbors(stack.pop()):
            if neighbor not in seen and enter(neighbor):
                seen.add(neighbor)
                stack.append(neighbor)
    return frozenset(seen)
