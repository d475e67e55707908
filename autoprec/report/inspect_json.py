"""The JSON of an inspection, which `autoprec inspect --json` prints; its shape is kept stable."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autoprec.analysis.diagnosis import Diagnosis
from autoprec.analysis.inspection import Inspection
from autoprec.analysis.marks import Mark, Reason
from autoprec.graph.site import Site
from autoprec.ops import lookup
from autoprec.report.inspect_view import marks_by_site
from autoprec.report.numerics_json import numerics_json
from autoprec.report.storage_json import loss_scale_json, storage_json

SCHEMA_VERSION = 1


def inspect_json(inspection: Inspection, *, workload: str, device: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that is known of a workload, as values that `json` can write; null for what was not run."""
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
        "num_batches": inspection.num_batches,
        "fp32_error": _number(inspection.fp32_error),
        "sites": [site_json(inspection, site, marks[site]) for site in inspection.op_graph.sites()],
        "diagnoses": [_diagnosis_json(each) for each in inspection.diagnoses],
        "storage": inspection.storage and storage_json(inspection.storage, ("fp32", *inspection.formats)),
        "loss_scale": inspection.gradients and loss_scale_json(inspection, inspection.gradients),
        "findings": [asdict(finding) for finding in inspection.findings],
    }


def _diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    check, repair = diagnosis.check, diagnosis.repair
    return {
        "format": diagnosis.format,
        "num_sites": diagnosis.num_sites,
        "is_broken": check.is_broken,
        "gradient_error": _number(check.damage.gradient_error),
        "loss_error": _number(check.damage.loss_error),
        "raised": check.damage.raised,
        "loss_scale": check.damage.loss_scale,
        "allowed_error": check.limit,
        "floor": check.floor,
        "repair": None
        if repair is None
        else {
            "sites": [str(site) for site in repair.sites],
            "chains": [[str(site) for site in chain] for chain in diagnosis.chains],
            "gradient_error": _number(repair.error),
            "num_steps": repair.num_steps,
            "is_minimal": repair.is_minimal,
        },
        "errors": [
            {"site": str(each.site), "first": _number(each.first), "last": _number(each.last)}
            for each in diagnosis.errors
        ],
        "kernel_faults": [{**asdict(fault), "site": str(fault.site)} for fault in diagnosis.kernel_faults],
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def site_json(inspection: Inspection, site: Site, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return what is known of `site`, whose own marks are `marks`."""
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
        "numerics": numerics_json(inspection.numerics.sites.get(site, ())),
    }


def _reason_json(reason: Reason) -> dict[str, Any]:
    return {"code": reason.code.value, "detail": reason.detail, "evidence": dict(reason.evidence)}
