"""Where a number that is not finite comes from: the first op that made one out of finite ones."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoprec.capture import Recording

_NAN, _INF = "nan", "inf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The op, parameter, buffer or input that a fault starts at; `made` is `nan` or `inf`."""

    what: str
    made: str
    source: str

    def __str__(self) -> str:
        return f"{self.what} gives {self.made}" + (f" ({self.source})" if self.source else "")


def first_non_finite(recording: Recording) -> Origin | None:
    """Return where the loss of a replay stops being finite; None if it is finite.

    Follows the fault back from the loss, nan before inf, to the op whose inputs do not have it: a mask of -inf that
    does no harm is never named.
    """
    faults: dict[str, str] = {}
    nodes: dict[str, fx.Node] = {}

    def look(node: fx.Node, value: Any) -> None:
        nodes[node.name] = node
        found = _fault(value)
        if found:
            faults[node.name] = found

    with torch.no_grad():
        recording.replay(look)
    at = next((node for node in nodes.values() if node.op == "output"), None)
    if at is None or at.name not in faults:
        return None
    while True:
        fault = faults[at.name]
        carriers = [node for node in at.all_input_nodes if faults.get(node.name) == fault]
        if not carriers:
            return _origin(recording, at, fault)
        at = carriers[0]


def with_state(recording: Recording, state: dict[str, torch.Tensor], batch: Any) -> Recording:
    """Return the recording with the model in `state` and the tensors of `batch` as inputs; shapes must be the same."""
    recording.model.load_state_dict(state)
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return replace(recording, inputs=tuple(dict.fromkeys(leaves)))


def _fault(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    if any(bool(torch.isnan(tensor).any()) for tensor in floats):
        return _NAN
    return _INF if any(bool(torch.isinf(tensor).any()) for tensor in floats) else ""


def _origin(recording: Recording, node: fx.Node, made: str) -> Origin:
    call = recording.op_graph[node.name] if node.name in recording.op_graph.digraph else None
    if call is None:
        return Origin(what=f"{node.op} {node.name}", made=made, source="")
    if call.kind in ("parameter", "buffer", "constant", "input"):
        return Origin(what=f"{call.kind} {call.target or node.name}", made=made, source=call.source)
    return Origin(what=f"op {call.site or call.op}", made=made, source=call.source)
