"""The JSON of an inspection, which `autoprec inspect --json` prints; its shape is kept stable."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autoprec.analysis.inspection import Inspection
from autoprec.analysis.marks import Mark, Reason
from autoprec.graph.site import Site
from autoprec.ops import lookup
from autoprec.report.inspect_view import marks_by_site
from autoprec.report.storage_json import loss_scale_json, storage_json

SCHEMA_VERSION = 1


def inspect_json(inspection: Inspection, *, workload: str, device: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that is known of a workload, as values that `json` can write."""
    marks = marks_by_site(inspection.marks)
    return {
        "schema_version": SCHEMA_VERSION,
        "workload": workload,
        "device": dict(device),
        "graph": {
            "num_sites": len(inspection.op_graph.sites()),
            "num_nodes": len(inspection.op_graph),
            "replay_matches": inspection.replay_matches,
        },
        "sites": [_site_json(site, marks[site]) for site in inspection.op_graph.sites()],
        "storage": storage_json(inspection.storage, ("fp32", *inspection.formats)),
        "loss_scale": loss_scale_json(inspection),
        "findings": [asdict(finding) for finding in inspection.findings],
    }


def _site_json(site: Site, marks: Sequence[Mark]) -> dict[str, Any]:
    op = lookup(site.op)
    return {
        "site": str(site),
        "module": site.module,
        "op": site.op,
        "index": site.index,
        "family": op.family,
        "class": op.numerics,
        "verdicts": {
            mark.format: {"verdict": mark.verdict, "reasons": [_reason_json(reason) for reason in mark.reasons]}
            for mark in marks
        },
    }


def _reason_json(reason: Reason) -> dict[str, Any]:
    return {"code": reason.code.value, "detail": reason.detail, "evidence": dict(reason.evidence)}
