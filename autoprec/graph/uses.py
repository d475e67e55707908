"""Which sites of a recorded step read each parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoprec.graph.site import Site

if TYPE_CHECKING:  # networkx, which a training job need not have
    from autoprec.graph.opgraph import OpGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses:
    """The sites that ran, in order, and by the name of each parameter those that read it.

    A site reads a parameter also through calls without a site, such as a transpose. `as_stored` holds the sites none of
    whose calls a policy casts.
    """

    sites: tuple[Site, ...]
    parameters: Mapping[str, tuple[Site, ...]]
    as_stored: frozenset[Site] = frozenset()


def uses_of(op_graph: "OpGraph") -> Uses:
    """Return what the recorded step reads of its parameters."""
    sites = op_graph.sites()
    parameters = {}
    for node in op_graph:
        if node.kind == "parameter":
            readers = set(_readers(op_graph, node.name))
            parameters[node.target] = tuple(site for site in sites if site in readers)
    castable = {node.site for node in op_graph.calls() if node.is_castable}
    as_stored = frozenset(site for site in sites if site not in castable)
    return Uses(sites=sites, parameters=parameters, as_stored=as_stored)


def _readers(op_graph: "OpGraph", name: str) -> Iterator[Site]:
    seen, waiting = {name}, [name]
    while waiting:
        source = waiting.pop()
        for reader, edge in op_graph.digraph.adj[source].items():
            node = op_graph[reader]
            if edge.get("memory") or reader in seen:
                continue
            seen.add(reader)
            if node.site is not None:
                yield node.site
            elif any(tensor.is_floating for tensor in node.outputs):
                waiting.append(reader)
