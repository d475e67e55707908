"""From the recorded `torch.fx` graph to the op graph that the analyses read."""

import networkx as nx
from torch import fx, nn

from autoprec.graph.opgraph import OpGraph, OpNode


def op_graph_of(graph: fx.Graph, model: nn.Module) -> OpGraph:
    """Return the op graph of a recorded graph: one node each, edges for values and for memory that was written."""
    digraph: nx.DiGraph[str] = nx.DiGraph()
    ran = set()
    for node in graph.nodes:
        digraph.add_node(node.name, call=_op_node(node))
        ran.add(node.meta.get("module"))
        for source in node.all_input_nodes:
            digraph.add_edge(source.name, node.name)
        for writer in node.meta.get("after", ()):
            if not digraph.has_edge(writer.name, node.name):
                digraph.add_edge(writer.name, node.name, memory=True)
    modules = {path: type(module).__name__ for path, module in model.named_modules() if path in ran}
    return OpGraph(digraph, modules)


def _op_node(node: fx.Node) -> OpNode:
    meta = node.meta
    return OpNode(
        name=node.name,
        kind=meta["kind"],
        op=meta.get("op", ""),
        site=meta.get("site"),
        call=meta.get("call", 0),
        target=meta.get("target", ""),
        inputs=meta.get("inputs", ()),
        outputs=meta.get("outputs", ()),
        constants=meta.get("constants", ()),
        source=meta.get("source", ""),
        left_alone=meta.get("left_alone", False),
        writes=meta.get("writes", False),
    )
