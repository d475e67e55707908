"""Which float32 tensors the calls of a step read, and which sites decide in what format they come.

A call that a policy casts returns its result in the format of its site. What has no site follows: a view has the format
of what it looks at, a call that writes to an argument has that argument's, and one that is left alone has the widest of
what it is given. Parameters, buffers, inputs, constants and what `.float()` returns are FP32. So is what the model
returns, before loss code reads it, and the loss.

`.to(...)` and `.type(...)` are taken for views: the op graph does not hold their arguments.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoprec.graph.opgraph import OpGraph, OpNode, Ref
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.ops import lookup

# Without numerics of their own, but what they return does not have the format of their first argument alone.
_OF_ALL = frozenset({"broadcast_tensors", "cartesian_prod", "combinations", "meshgrid", "type_as"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """One tensor that one call reads in its own format.

    `tensor` names the node whose result is read, then what that is a view of, nearest first. The tensor is low if all
    `producers` are; without any it is FP32. `reader` is None for what must be given FP32. What `leaves` the model is
    cast once, however many calls of the loss code read it.
    """

    tensor: tuple[str, ...]
    producers: tuple[Site, ...]
    reader: Site | None
    leaves: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """What the result of a node is."""

    tensor: tuple[str, ...]
    producers: tuple[Site, ...] = ()
    in_loss: bool = False


def choices_of(op_graph: OpGraph) -> dict[Site, tuple[OpNode, ...]]:
    """Return the sites whose format a policy chooses, in order, each with the calls that it casts."""
    calls: dict[Site, list[OpNode]] = {}
    for node in op_graph.calls():
        if _is_cast(node):
            assert node.site is not None
            calls.setdefault(node.site, []).append(node)
    return {site: tuple(nodes) for site, nodes in calls.items()}


def reads_of(op_graph: OpGraph) -> tuple[Read, ...]:
    """Return every read of a float32 tensor that may need a cast, in order of execution."""
    results: dict[str, _Result] = {}
    reads: list[Read] = []
    for node in op_graph:
        sources = [results[name] for name in _arguments(op_graph, node) if name in results]
        reads.extend(_reads(node, sources))
        if any(meta.dtype == "float32" for meta in node.outputs):
            results[node.name] = _result(node, sources)
    return tuple(reads)


def _is_cast(node: OpNode) -> bool:
    return node.site is not None and node.is_castable and all(meta.dtype != "float64" for meta in node.inputs)


def _arguments(op_graph: OpGraph, node: OpNode) -> Iterator[str]:
    """Yield what a call is given, as often as it is among the arguments: each of them is cast for itself."""
    times = Counter(_references((node.args, node.kwargs)))
    for source in op_graph.digraph.predecessors(node.name):
        if not op_graph.digraph.edges[source, node.name].get("memory"):
            yield from [source] * max(times[source], 1)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for part in value:
            yield from _references(part)
    elif isinstance(value, Mapping):
        yield from _references(tuple(value.values()))


def _reads(node: OpNode, sources: Sequence[_Result]) -> Iterator[Read]:
    if node.kind == "output":
        for each in sources:
            yield Read(tensor=each.tensor, producers=each.producers, reader=None, leaves=True)
        return
    in_loss, cast = _in_loss(node), _is_cast(node)
    if cast and lookup(node.op).cast == "first":  # norms take their parameters as they are stored
        sources = sources[:1]
    for each in sources:
        leaves = in_loss and _is_of_model(each)
        if leaves or node.op == "float":
            yield Read(tensor=each.tensor, producers=each.producers, reader=None, leaves=leaves)
        if cast:
            yield Read(tensor=each.tensor, producers=() if leaves else each.producers, reader=node.site)


def _result(node: OpNode, sources: Sequence[_Result]) -> _Result:
    here, in_loss = (node.name,), _in_loss(node)
    if _is_cast(node):
        assert node.site is not None
        return _Result(tensor=here, producers=(node.site,), in_loss=in_loss)
    if not sources or node.op == "float":
        return _Result(tensor=here, in_loss=in_loss)
    # In loss code outside the model, what the model computed has become FP32.
    given = [() if in_loss and _is_of_model(each) else each.producers for each in sources]
    op, first = lookup(node.op), sources[0]
    if node.writes or (op.cast == "none" and op.name not in _OF_ALL):
        is_view = op.family == "movement" or op.name == "getitem"
        tensor = (*here, *first.tensor) if is_view else here
        return _Result(tensor=tensor, producers=given[0], in_loss=in_loss or first.in_loss)
    widest = tuple(dict.fromkeys(site for producers in given for site in producers)) if all(given) else ()
    return _Result(tensor=here, producers=widest, in_loss=in_loss or all(each.in_loss for each in sources))


def _in_loss(node: OpNode) -> bool:
    return node.site is not None and node.site.module == LOSS_MODULE


def _is_of_model(result: _Result) -> bool:
    return bool(result.producers) and not result.in_loss
