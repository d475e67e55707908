"""Where a run stops being reproducible: the first op that differs between two recordings, or from a replay."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from autoprec.capture.facts import digest, tensors_in_tree
from autoprec.capture.recording import Recording, record, same_loss
from autoprec.errors import ReplayError
from autoprec.graph.opgraph import OpNode
from autoprec.ops import lookup
from autoprec.workload import Workload


def require_reproducible(recording: Recording, workload: Workload) -> None:
    """Return if a second run of the workload and a replay of `recording` both give its loss bit for bit.

    Raises: `ReplayError` that names the first op that differs and the likely cause: the workload itself, if two
    runs under one seed differ, else an op that the recording does not reproduce.
    """
    again = record(workload, device=recording.device, seed=recording.seed)
    if same_loss(again.loss, recording.loss) and recording.replay_matches:
        return
    first = record(workload, device=recording.device, seed=recording.seed, digests=True)
    second = record(workload, device=recording.device, seed=recording.seed, digests=True)
    found = next(_differences(first, second), None)
    if found is not None:
        raise ReplayError(
            f"recording: two runs of the workload under seed {recording.seed} differ, first at {_place(found[0])}; "
            f"likely cause: {found[1]}"
        )
    differing = _first_difference_in_replay(first)
    where = "in the loss alone" if differing is None else f"first at {_place(differing)}"
    raise ReplayError(
        f"recording: the replay gives a loss of {first.replay().item():.9g} where {first.loss:.9g} was recorded, "
        f"differing {where}; likely cause: it reads or writes state outside the model's parameters and buffers "
        "(a global tensor, a cache kept between calls); make that state a buffer, or compute it in forward"
    )


def _differences(one: Recording, other: Recording) -> Iterator[tuple[OpNode, str]]:
    """Yield the ops of `one` that differ in `other`, with the likely cause, up to where the paths part."""
    others = iter(other.op_graph)
    for node in one.op_graph:
        twin = next(others, None)
        if twin is None or (node.kind, node.op, node.site) != (twin.kind, twin.op, twin.site):
            yield node, "control flow that depends on something other than the batch and the seed"
            return
        if node.constants != twin.constants:
            yield node, "a number made outside torch (time, a random generator that the seed does not reach)"
        elif one.digests.get(node.name) != other.digests.get(twin.name):
            yield node, _cause_of_a_value(node)


def _first_difference_in_replay(recording: Recording) -> OpNode | None:
    differing: list[str] = []

    def compare(node: fx.Node, value: Any) -> None:
        if node.name in recording.digests and not differing:
            found = tuple(digest(tensor) for tensor in tensors_in_tree(value))
            if found and found != recording.digests[node.name]:
                differing.append(node.name)

    recording.replay(compare)
    return recording.op_graph[differing[0]] if differing else None


def _place(node: OpNode) -> str:
    name = f"op {node.site}" if node.site is not None else f"{node.op or node.kind} {node.target}".strip()
    return f"{name} ({node.source})" if node.source else name


def _cause_of_a_value(node: OpNode) -> str:
    if node.kind == "constant":
        return "a tensor outside the model that changes between runs (a global, a cache); make it a buffer"
    if lookup(node.op).family == "random":
        return "a random generator that the seed does not reach; seed that generator in the workload"
    if node.op in ("tensor", "from_numpy", "as_tensor"):
        return "a value made outside torch (time, an unseeded numpy generator, the order of a set)"
    return "a kernel that is not deterministic; try torch.use_deterministic_algorithms(True)"
