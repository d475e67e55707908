"""Ranges: for each node of an op graph an interval that its values lie in, found without running anything.

What is not known of inputs, parameters and ops is taken to be anything, so a bound may be wide but is never wrong, up
to the one assumption about fused norms that `autoprec.analysis.ranges.norms` states.
"""

from collections.abc import Mapping
from types import MappingProxyType

from autoprec.analysis.ranges import functions, norms, pointwise, shaped, sums
from autoprec.analysis.ranges.interval import TOP, Interval, everything, fit, hull
from autoprec.analysis.ranges.reading import Reading, Rule
from autoprec.graph.opgraph import OpGraph, OpNode, Ref

RULES: Mapping[str, Rule] = MappingProxyType(
    {**shaped.RULES, **pointwise.RULES, **functions.RULES, **sums.RULES, **norms.RULES}
)

# Calls that change their first argument in a way that no rule of theirs describes: by another memory or another shape.
_REPLACE = frozenset({"set", "resize", "resize_as"})

# Fused kernels that write to the running statistics among their arguments, unseen by autograd.
_KEEP_STATISTICS = frozenset({"batch_norm", "instance_norm"})

Known = Mapping[str, Interval]
NOTHING_KNOWN: Known = MappingProxyType({})


def ranges_of(op_graph: OpGraph, known: Known = NOTHING_KNOWN, *, inputs: Interval = TOP) -> dict[str, Interval]:
    """Return an interval for each node, of all its results together, that holds whatever the data.

    `known` are those of parameters, buffers and constants by their target, and of inputs by the name of their node;
    `inputs` is assumed of floating inputs that it does not name. Takes time linear in nodes and edges.
    """
    return _Propagation(op_graph, known, inputs).run()


class _Propagation:
    """The intervals so far: of each node, of what its name gives when read now, and of all memory it shares."""

    def __init__(self, op_graph: OpGraph, known: Known, inputs: Interval) -> None:
        self._graph = op_graph
        self._known = known
        self._inputs = inputs
        self._found: dict[str, Interval] = {}
        self._parts: dict[str, tuple[Interval, ...]] = {}
        self._memory: dict[str, Interval] = {}
        self._has_memory = any(edge.get("memory") for *_, edge in op_graph.digraph.edges(data=True))

    def run(self) -> dict[str, Interval]:
        """Return the interval of every node."""
        replaced: dict[str, Interval] = {}
        for node in self._graph:
            self._found[node.name] = self._memory[node.name] = self._interval(node)
            if self._has_memory:
                self._memory[node.name] = self._memory_of(node)
            for name in _replaced(node):
                replaced.setdefault(name, self._found[name])
                self._found[name] = self._memory[name] = TOP
        return {**self._found, **replaced}

    def _interval(self, node: OpNode) -> Interval:
        if node.kind != "op":
            return self._source(node)
        picked = self._picked(node)
        if picked is not None:
            return picked
        rule = RULES.get(node.op)
        if rule is None or not (node.args or node.kwargs) or not node.outputs:
            return hull(everything(meta.dtype) for meta in node.outputs)
        call = Reading(node, self._graph, self._reader(node), is_pure=not self._has_memory)
        return self._applied(node, rule, call)

    def _applied(self, node: OpNode, rule: Rule, call: Reading) -> Interval:
        result = rule.apply(call)
        several = result if isinstance(result, tuple) else (result,) * len(node.outputs)
        if len(several) != len(node.outputs):
            return hull(everything(meta.dtype) for meta in node.outputs)
        operands = [self._found[ref.name] for ref in call.given() if isinstance(ref, Ref)]
        keeps = rule.keeps_numbers and all(each.is_number for each in operands)
        converts = bool(node.inputs) and node.inputs[0].dtype != node.outputs[0].dtype
        roundings = max(rule.num_roundings, 1.0 if converts else 0.0)
        parts = tuple(
            _stored(each, meta.dtype, roundings, keeps=keeps) for each, meta in zip(several, node.outputs, strict=True)
        )
        if len(parts) > 1:
            self._parts[node.name] = parts
        return hull(parts)

    def _picked(self, node: OpNode) -> Interval | None:
        """Return the interval of one of several results; None if the node picks none."""
        if node.op != "getitem" or len(node.args) != 2 or not isinstance(node.args[0], Ref):
            return None
        parts = self._parts.get(node.args[0].name)
        if parts is None or not isinstance(node.args[1], int):
            return None
        return parts[node.args[1]] if -len(parts) <= node.args[1] < len(parts) else TOP

    def _source(self, node: OpNode) -> Interval:
        dtype = node.outputs[0].dtype if node.outputs else ""
        if self._keeps_statistics(node):
            return everything(dtype)
        known = self._known.get(node.target or node.name)
        if known is not None:
            return known
        is_input = node.kind == "input" and bool(node.outputs) and node.outputs[0].is_floating
        return self._inputs if is_input else everything(dtype)

    def _keeps_statistics(self, node: OpNode) -> bool:
        """Return whether a kernel writes to this buffer unseen, and another call reads it."""
        readers = (
            [self._graph[name] for name in self._graph.digraph.successors(node.name)] if node.kind == "buffer" else []
        )
        return len(readers) > 1 and any(reader.op in _KEEP_STATISTICS for reader in readers)

    # Memory that was written to

    def _reader(self, node: OpNode) -> "_Read":
        return _Read(self._found, self._written(node))

    def _written(self, node: OpNode) -> tuple[Interval, ...]:
        """Return the intervals of memory that changed since it had the names by which `node` reads it."""
        if not self._has_memory:
            return ()
        edges = self._graph.digraph.pred[node.name]
        return tuple(self._memory[name] for name, edge in edges.items() if edge.get("memory"))

    def _memory_of(self, node: OpNode) -> Interval:
        """Return what any memory that the results of `node` may share can hold: all that went into it."""
        sources = self._graph.digraph.pred[node.name]
        return hull((self._found[node.name], *(self._memory[name] for name in sources)))


class _Read:
    """What the name of an earlier node gives to a call: its values, and those that memory holds by now."""

    __slots__ = ("_found", "_written")

    def __init__(self, found: Mapping[str, Interval], written: tuple[Interval, ...]) -> None:
        self._found = found
        self._written = written

    def __call__(self, name: str) -> Interval:
        found = self._found.get(name, TOP)
        return hull((found, *self._written)).loose() if self._written else found


def _stored(each: Interval, dtype: str, num_roundings: float, *, keeps: bool) -> Interval:
    """Return a result once it is stored as `dtype`; a bounded result of numbers is a number if the op `keeps` them."""
    is_number = keeps and each.is_finite
    if is_number != each.is_number and not (each.is_number and each.is_integer):
        each = Interval(each.lo, each.hi, each.is_integer, is_number, each.is_tight)
    fitted = fit(each, dtype, num_roundings=num_roundings)
    if fitted.is_number and not (is_number and fitted.is_finite) and not everything(dtype).is_integer:
        return Interval(fitted.lo, fitted.hi, fitted.is_integer, is_tight=fitted.is_tight)
    return fitted


def _replaced(node: OpNode) -> tuple[str, ...]:
    first = node.args[0] if node.op in _REPLACE and node.args else None
    return (first.name,) if isinstance(first, Ref) else ()
