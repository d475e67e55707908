"""The JSON of one explained site, which `autoprec inspect --explain SITE --json` prints."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from autoprec.analysis.inspection import Inspection
from autoprec.graph.neighbors import Neighbor, readers_of, reads_of
from autoprec.graph.opgraph import OpNode, TensorMeta
from autoprec.graph.site import Site
from autoprec.report.inspect_json import SCHEMA_VERSION, site_json
from autoprec.report.inspect_view import marks_by_site


def explain_json(inspection: Inspection, site: Site, *, workload: str, device: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that is known of `site`, as values that `json` can write."""
    graph = inspection.op_graph
    return {
        "schema_version": SCHEMA_VERSION,
        "workload": workload,
        "device": dict(device),
        "num_batches": inspection.numerics.num_batches,
        "site": site_json(inspection, site, marks_by_site(inspection.marks)[site]),
        "calls": [_call_json(node) for node in graph.calls_of(site)],
        "reads": _neighbors_json(reads_of(graph, site)),
        "read_by": _neighbors_json(readers_of(graph, site)),
        "findings": [
            {"code": each.code, "severity": each.severity, "message": each.message, "fix": each.fix}
            for each in inspection.findings
            if each.site == str(site)
        ],
    }


def _call_json(node: OpNode) -> dict[str, Any]:
    return {
        "source": node.source,
        "left_alone": node.left_alone,
        "writes": node.writes,
        "constants": [each if math.isfinite(each) else str(each) for each in node.constants],
        "inputs": [_meta_json(meta) for meta in node.inputs],
        "outputs": [_meta_json(meta) for meta in node.outputs],
    }


def _meta_json(meta: TensorMeta) -> dict[str, Any]:
    return {"shape": list(meta.shape), "dtype": meta.dtype, "requires_grad": meta.requires_grad}


def _neighbors_json(neighbors: Iterable[Neighbor]) -> list[dict[str, Any]]:
    return [
        {
            "kind": each.node.kind if each.node.site is None else "site",
            "name": str(each.node.site or each.node.target or each.node.name),
            "via": list(each.via),
            "source": each.node.source,
        }
        for each in neighbors
    ]
