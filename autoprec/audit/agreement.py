"""Whether two audits of one policy agree, gate by gate."""

from dataclasses import replace
from pathlib import Path

from autoprec.errors import RecordError
from autoprec.records import load_audit
from autoprec.records.audit import AuditRecord, EvidenceRecord, GateRecord

_GATE = "repeat"


def held_against_former(found: AuditRecord, path: Path) -> AuditRecord:
    """Return an audit whose gate `repeat` is held against the former audit in the file `path`, if there is one.

    `repeat` fails if the two came to different verdicts at a gate that had the same thresholds. An audit of another
    policy, workload or device, or by other versions, need not agree: a note says that it was not compared.
    """
    if not path.exists() or all(gate.gate != _GATE for gate in found.gates):
        return found
    try:
        former = load_audit(path)
    except RecordError as error:
        return _with(found, (), note=f"the former audit is not compared: {error}")
    changed = [name for name in ("policy", "workload", "device", "versions") if _of(former, name) != _of(found, name)]
    if changed:
        return _with(found, (), note=f"the former audit is not compared: it had another {', '.join(changed)}")
    before = {gate.gate: gate for gate in former.gates}
    pairs = [
        (before[gate.gate], gate)
        for gate in found.gates
        if gate.gate != _GATE and gate.gate in before and before[gate.gate].thresholds == gate.thresholds
    ]
    rows = tuple(_row(old, new) for old, new in pairs if old.verdict != new.verdict)
    verdicts = f"other verdicts at {', '.join(row.where for row in rows)}" if rows else "the same verdicts"
    return _with(found, rows, said=f"; the audit of {former.created} came to {verdicts} ({len(pairs)} gates compared)")


def _of(record: AuditRecord, name: str) -> object:
    value = getattr(record, name)
    return dict(value) if name == "versions" else value


def _row(old: GateRecord, new: GateRecord) -> EvidenceRecord:
    return EvidenceRecord(
        where=new.gate,
        what=f"{old.verdict} before ({old.measured}), {new.verdict} now ({new.measured})",
        value=new.value,
        threshold=new.threshold,
    )


def _with(found: AuditRecord, rows: tuple[EvidenceRecord, ...], *, said: str = "", note: str = "") -> AuditRecord:
    gates = (_extended(gate, found, rows, said, note) if gate.gate == _GATE else gate for gate in found.gates)
    return replace(found, gates=tuple(gates))


def _extended(
    gate: GateRecord, found: AuditRecord, rows: tuple[EvidenceRecord, ...], said: str, note: str
) -> GateRecord:
    again = (
        "a gate that wavers is near its threshold: give it more steps in the gates file, then run once more: "
        f"autoprec audit {found.workload} --policy {found.policy_file}"
    )
    return replace(
        gate,
        verdict="fail" if rows else gate.verdict,
        measured=gate.measured + said,
        evidence=(*gate.evidence, *rows),
        advice=gate.advice or (again if rows else ""),
        notes=(*gate.notes, note) if note else gate.notes,
    )
