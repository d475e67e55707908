"""What a site reads, and who reads it: the nearest sites, parameters and inputs, past ops that compute nothing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.site import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbor:
    """A node next to a site. `via` are the ops without a site between the two, such as views, nearest first."""

    node: OpNode
    via: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.node.site is not None:
            return str(self.node.site)
        return f"{self.node.kind} {self.node.target or self.node.name}" if self.node.kind != "output" else "the loss"


def named_neighbor(op_graph: OpGraph, name: str) -> Neighbor:
    """Return what the tensor of the node called `name` really comes from: the node, or what it is a view of."""
    node, via = op_graph[name], []
    while node.kind == "op" and node.site is None:
        before = next(iter(op_graph.digraph.predecessors(node.name)), None)
        if before is None:
            break
        via.append(node.op)
        node = op_graph[before]
    return Neighbor(node=node, via=tuple(via))


def reads_of(op_graph: OpGraph, site: Site) -> tuple[Neighbor, ...]:
    """Return what the calls of `site` read, each once, in the order of their arguments."""
    return _neighbors(op_graph, site, op_graph.digraph.predecessors)


def readers_of(op_graph: OpGraph, site: Site) -> tuple[Neighbor, ...]:
    """Return what reads the results of the calls of `site`, each once, in the order of execution."""
    return _neighbors(op_graph, site, op_graph.digraph.successors)


def _neighbors(op_graph: OpGraph, site: Site, next_to: Callable[[str], Iterable[str]]) -> tuple[Neighbor, ...]:
    found: dict[str, Neighbor] = {}
    for call in op_graph.calls_of(site):
        for each in _walk(op_graph, call.name, next_to):
            found.setdefault(str(each), each)
    return tuple(found.values())


def _walk(op_graph: OpGraph, start: str, next_to: Callable[[str], Iterable[str]]) -> Iterator[Neighbor]:
    seen: set[str] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in next_to(start)]
    while waiting:
        name, via = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        node = op_graph[name]
        if node.kind == "op" and node.site is None and any(True for _ in next_to(name)):
            waiting = [*((beyond, (*via, node.op)) for beyond in next_to(name)), *waiting]
        else:
            yield Neighbor(node=node, via=via)
