"""Whether two audits of one policy agree, gate by gate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoprec.records.audit import AuditRecord, EvidenceRecord, GateRecord

_GATE = "repeat"


def held_against(
    gates: Sequence[GateRecord], former: AuditRecord, versions: Mapping[str, str]
) -> tuple[GateRecord, ...]:
    """Return the gates with what a former audit of the same policy says added to `repeat`, which fails if they differ.

    Gates that had other thresholds, or were not there, say nothing; nor does an audit by other versions, which need not
    agree: `match` names those.
    """
    if former.versions != versions:
        return _with(gates, " (the former audit was made by other versions and is not compared)", ())
    before = {gate.gate: gate for gate in former.gates}
    pairs = [
        (before[gate.gate], gate)
        for gate in gates
        if gate.gate != _GATE and gate.gate in before and dict(before[gate.gate].thresholds) == dict(gate.thresholds)
    ]
    rows = tuple(_row(old, new) for old, new in pairs if old.verdict != new.verdict)
    said = f"; the audit of {former.created} came to " + (
        f"other verdicts at {', '.join(row.where for row in rows)}" if rows else f"the same verdict at all {len(pairs)} gates"
    )
    return _with(gates, said, rows)


def _row(old: GateRecord, new: GateRecord) -> EvidenceRecord:
    return EvidenceRecord(
        where=new.gate, what=f"{old.verdict} before ({old.measured}), {new.verdict} now ({new.measured})",
        value=new.value, threshold=new.threshold,
    )  # fmt: skip


def _with(gates: Sequence[GateRecord], said: str, rows: tuple[EvidenceRecord, ...]) -> tuple[GateRecord, ...]:
    return tuple(_extended(gate, said, rows) if gate.gate == _GATE else gate for gate in gates)


def _extended(gate: GateRecord, said: str, rows: tuple[EvidenceRecord, ...]) -> GateRecord:
    advice = gate.advice or "audit once more on a quiet machine; a gate that wavers is near its threshold: raise its steps"
    return replace(
        gate,
        verdict="fail" if rows else gate.verdict,
        measured=gate.measured + said,
        evidence=(*gate.evidence, *rows),
        advice=advice if rows or gate.verdict == "fail" else "",
    )
