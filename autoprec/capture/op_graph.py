"""From the recorded `torch.fx` graph to the op graph that the analyses read."""

import operator
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from autoprec.graph.opgraph import OpGraph, OpNode, Ref


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
    args, kwargs = _arguments(node)
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
        args=args,
        kwargs=kwargs,
    )


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as plain values, in the order of its op; nothing for what is no call of torch."""
    if node.op != "call_function" or node.meta.get("opaque"):
        return (), {}
    args = node.args[1:] if node.target is operator.call else node.args  # whose first is the function
    if node.meta.get("reflected"):
        args = (*reversed(args[:2]), *args[2:])
    return tuple(_plain(value) for value in args), {name: _plain(value) for name, value in node.kwargs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if value is None or isinstance(value, bool | int | float | complex | str) else str(value)
