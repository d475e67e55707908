"""What `autoprec audit --json` prints, computed from a record alone."""

import math
from typing import Any

from autoprec.records.audit import AuditRecord, GateRecord
from autoprec.records.codec import encode

_SCHEMA_VERSION = 1


def audit_json(record: AuditRecord) -> dict[str, Any]:
    """Return an audit as `--json` prints it; a number that is not finite is null."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "passed": record.passed,
        "failed": [gate.gate for gate in record.failed],
        "workload": record.workload,
        "policy": record.policy_file,
        "gates_file": record.gates_file,
        "seed": record.seed,
        "device": encode(record.device),
        "versions": dict(record.versions),
        "gates": [_gate(gate) for gate in record.gates],
        "record": record.record_file,
        "created": record.created,
        "wall_s": record.wall_s,
    }


def _gate(gate: GateRecord) -> dict[str, Any]:
    return {
        "gate": gate.gate,
        "verdict": gate.verdict,
        "proves": gate.proves,
        "measured": gate.measured,
        "value": _finite(gate.value),
        "threshold": _finite(gate.threshold),
        "unit": gate.unit,
        "thresholds": {name: _finite(value) for name, value in gate.thresholds.items()},
        "evidence": [
            {
                "where": row.where,
                "what": row.what,
                "value": _finite(row.value),
                "threshold": _finite(row.threshold),
            }
            for row in gate.evidence
        ],
        "advice": gate.advice,
        "notes": list(gate.notes),
        "wall_s": gate.wall_s,
    }


def _finite(value: float | None) -> float | None:
    """Return None for what JSON has no word for."""
    return value if value is None or math.isfinite(value) else None
