"""Whether a graph convolves tensors that have a layout to choose."""

from autoprec.graph.opgraph import OpGraph
from autoprec.ops import lookup

_WITH_CHANNELS_LAST = (4, 5)  # dimensions; torch knows no such layout for others


def has_convolutions(op_graph: OpGraph) -> bool:
    """Return whether an op of the graph is a convolution over a tensor of 4 or 5 dimensions."""
    return any(
        lookup(node.op).family == "convolution" and any(len(each.shape) in _WITH_CHANNELS_LAST for each in node.inputs)
        for node in op_graph.calls()
    )
