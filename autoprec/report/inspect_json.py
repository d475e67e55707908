"""The JSON of an inspection, which `autoprec inspect --json` prints; its shape is kept stable."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autoprec.analysis.diagnosis import Diagnosis
from autoprec.analysis.inspection import Inspection
from autoprec.analysis.loss_scale import HEADROOM, GradientHistograms, LossScaleAdvice
from autoprec.analysis.marks import Mark, Reason
from autoprec.analysis.storage import STORED_PARTS, Storage
from autoprec.graph.site import Site
from autoprec.numerics import format_named
from autoprec.ops import lookup
from autoprec.report.inspect_view import marks_by_site
from autoprec.report.numerics_json import numerics_json

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
        "sites": [site_json(inspection, site, marks[site]) for site in inspection.op_graph.sites()],
        "diagnoses": [_diagnosis_json(each) for each in inspection.diagnoses],
        "storage": inspection.storage and _storage_json(inspection.storage, ("fp32", *inspection.formats)),
        "loss_scale": inspection.gradients and _loss_scale_json(inspection, inspection.gradients),
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
        "kernel_faults": [{**asdict(fault), "site": str(fault.site)} for fault in diagnosis.kernel_faults],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


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


def _storage_json(storage: Storage, formats: Sequence[str]) -> dict[str, Any]:
    return {
        "measured": storage.measured,
        "optimizer": storage.optimizer,
        "lr": storage.lr,
        "bytes": {part: {name: storage.num_bytes(part, name) for name in formats} for part in STORED_PARTS},
        "parameters": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "bytes": _sizes(each.num_elements, formats),
                "gradient_bytes": _sizes(each.num_elements, formats),
                "optimizer_state_bytes": _sizes(each.num_state_elements, formats),
                "lost_update_frac": dict(each.lost_update_frac),
            }
            for each in storage.parameters
        ],
        "buffers": [
            {"name": each.name, "shape": list(each.shape), "bytes": _sizes(each.num_elements, formats)}
            for each in storage.buffers
        ],
    }


def _sizes(num_elements: int, formats: Sequence[str]) -> dict[str, int]:
    return {name: num_elements * format_named(name).storage_bits // 8 for name in formats}


def _loss_scale_json(inspection: Inspection, gradients: GradientHistograms) -> dict[str, Any]:
    """Return the advice for each format, and the histogram of all parameter gradients."""
    counts: Counter[int] = Counter()
    for histogram in gradients.parameters.values():
        counts.update(dict(histogram.counts))
    return {
        "measured": True,
        "headroom": HEADROOM,
        "formats": {each.format: _advice_json(each) for each in inspection.advice},
        "histogram": [{"exponent": exponent, "count": counts[exponent]} for exponent in sorted(counts)],
        "num_zero": sum(each.num_zero for each in gradients.parameters.values()),
        "num_nonfinite": sum(each.num_nonfinite for each in gradients.parameters.values()),
    }


def _advice_json(advice: LossScaleAdvice) -> dict[str, Any]:
    fields = asdict(advice)
    fields["lost"] = [{"site": site, "norm_frac": frac} for site, frac in advice.lost]
    fields["overflowing"] = list(advice.overflowing)
    del fields["format"]
    return fields
