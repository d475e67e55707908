"""Where a number that is not finite comes from: the first op that made one out of finite ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoprec.capture import Recording
from autoprec.workload.batches import tensors_of

_NAN, _INF = "nan", "inf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The op, parameter, buffer or input that a fault starts at; `made` is `nan` or `inf`."""

    what: str
    made: str
    source: str
    cause: str = ""

    def __str__(self) -> str:
        place = f" ({self.source})" if self.source else ""
        return f"{self.what} gives {self.made}{place}" + (f", out of the inf of {self.cause}" if self.cause else "")


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

    recording.replay(look)
    at = next((node for node in nodes.values() if node.op == "output"), None)
    if at is None or at.name not in faults:
        return None
    at = _followed(at, faults, faults[at.name])
    origin = _origin(recording, at, faults[at.name])
    behind = next((node for node in at.all_input_nodes if faults.get(node.name) == _INF), None)
    if origin.made == _NAN and behind is not None:  # inf - inf, 0 * inf: say where the inf comes from
        first = _origin(recording, _followed(behind, faults, _INF), _INF)
        origin = replace(origin, cause=first.what + (f" ({first.source})" if first.source else ""))
    return origin


def _followed(node: fx.Node, faults: Mapping[str, str], fault: str) -> fx.Node:
    """Return the first op, parameter or input that has `fault`, upstream of `node`."""
    while True:
        carriers = [each for each in node.all_input_nodes if faults.get(each.name) == fault]
        if not carriers:
            return node
        node = carriers[0]


def with_state(recording: Recording, state: dict[str, torch.Tensor], batch: Any) -> Recording:
    """Return the recording with the model in `state` and the tensors of `batch` as inputs; shapes must be the same."""
    recording.model.load_state_dict(state)
    return replace(recording, inputs=tuple(dict.fromkeys(tensors_of(batch))))


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
