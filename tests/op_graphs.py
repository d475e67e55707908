"""Op graphs by hand, for tests that need no torch."""

from collections.abc import Iterable
from itertools import pairwise

import networkx as nx

from autoprec.graph.opgraph import NodeKind, OpGraph, OpNode, TensorMeta
from autoprec.graph.site import Site


def tensor(*shape: int, dtype: str = "float32") -> TensorMeta:
    """Return the meta of a tensor of `shape`."""
    return TensorMeta(shape=shape, dtype=dtype)


def node(
    name: str,
    op: str = "",
    *,
    module: str = "",
    index: int | None = 0,
    call: int = 0,
    kind: NodeKind = "op",
    inputs: tuple[TensorMeta, ...] = (TensorMeta(shape=(4, 8), dtype="float32"),),
    outputs: tuple[TensorMeta, ...] = (TensorMeta(shape=(4, 8), dtype="float32"),),
    constants: tuple[float, ...] = (),
    left_alone: bool = False,
    writes: bool = False,
) -> OpNode:
    """Return a node called `name`; it has a site unless `index` is None."""
    site = Site(module, op, index) if op and index is not None else None
    return OpNode(
        name=name, kind=kind, op=op, site=site, call=call, inputs=inputs, outputs=outputs, constants=constants,
        left_alone=left_alone, writes=writes, source=f"model.py:{len(name)}" if op else "",
    )  # fmt: skip


def op_graph(
    nodes: Iterable[OpNode], edges: Iterable[tuple[str, str]] = (), modules: dict[str, str] | None = None
) -> OpGraph:
    """Return the graph of `nodes`, in that order, and `edges`."""
    digraph: nx.DiGraph[str] = nx.DiGraph()
    for each in nodes:
        digraph.add_node(each.name, call=each)
    digraph.add_edges_from(edges)
    return OpGraph(digraph, modules or {})


def chain(*nodes: OpNode) -> OpGraph:
    """Return the graph in which each of `nodes` reads the one before."""
    return op_graph(nodes, [(a.name, b.name) for a, b in pairwise(nodes)])
