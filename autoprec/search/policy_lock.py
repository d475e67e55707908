"""The lock of a policy: what it was tuned for, small enough to stand in its file and enough to name what changed."""

import hashlib
from collections.abc import Mapping
from typing import Any

from autoprec.errors import DeviceError
from autoprec.graph.folded_names import folded, numbers_in, ranges, unfolded
from autoprec.graph.opgraph import OpGraph, TensorMeta
from autoprec.graph.site import Site
from autoprec.runtime.autocast_lists import kernels, list_changes
from autoprec.runtime.device import DeviceInfo
from autoprec.runtime.flags import torch_flags


def policy_lock(op_graph: OpGraph, device: DeviceInfo) -> dict[str, Any]:
    """Return what a policy holds for: graph, sites, shapes, device, torch, autocast lists and flags of now.

    `sites` are ops by module and `parameters` shapes by name, both folded over layers that are alike.
    """
    nodes = tuple(op_graph)
    return {
        "graph": op_graph.fingerprint(),
        "sites": folded(_ops_by_module(op_graph)),
        "parameters": folded(
            {node.target: shape_text(node.outputs) for node in nodes if node.kind in ("parameter", "buffer")}
        ),
        "inputs": [shape_text(node.outputs) for node in nodes if node.kind == "input"],
        "device": {"kind": device.kind, "name": device.name},
        "torch": device.torch_version,
        "autocast": _autocast(device.kind),
        "flags": dict(torch_flags(device.kind)),
    }


def locked_sites(lock: Mapping[str, Any]) -> tuple[Site, ...]:
    """Return every site of a lock."""
    found = []
    for module, ops in unfolded(lock.get("sites", {})).items():
        for text in ops.split():
            op, _, numbers = text.rpartition("#")
            found += [Site(module, op, index) for index in numbers_in(numbers)]
    return tuple(found)


def shape_text(metas: tuple[TensorMeta, ...]) -> str:
    """Return dtype and shape of tensors: `float32[64,192]`."""
    return " ".join(f"{meta.dtype}[{','.join(map(str, meta.shape))}]" for meta in metas)


def _ops_by_module(op_graph: OpGraph) -> dict[str, str]:
    """Return the ops of each module with their numbers, in the order of their names: `layer_norm#0-1 linear#0`."""
    found: dict[str, dict[str, list[int]]] = {}
    for site in op_graph.sites():
        found.setdefault(site.module, {}).setdefault(site.op, []).append(site.index)
    return {
        module: " ".join(f"{op}#{ranges(indices)}" for op, indices in sorted(ops.items()))
        for module, ops in found.items()
    }


def _autocast(kind: str) -> dict[str, Any]:
    """Return a hash of torch's autocast lists, and where they differ from the catalog, which names what moved."""
    try:
        found, changes = kernels(kind), list_changes(kind)
    except DeviceError:
        return {}
    digest = hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16]
    return {"lists": digest, "gone": list(changes.gone), "new": list(changes.new)}
