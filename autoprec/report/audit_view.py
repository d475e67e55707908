"""What an audit shows: every number, label and order, computed from its record alone."""

import math
from dataclasses import dataclass

from autoprec.records.audit import AuditRecord, EvidenceRecord, GateRecord
from autoprec.records.quantities import seconds_text

_MOST_EVIDENCE = 6
_VERDICTS = {"pass": "pass", "fail": "FAIL", "not-applicable": "n/a"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRow:
    """One line of the table of gates; `state` is the verdict as records name it, `verdict` as people read it."""

    gate: str
    state: str
    verdict: str
    measured: str
    threshold: str
    proves: str
    took: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceRow:
    """One thing that a failed gate found: where, what, the number and the threshold it was held against."""

    where: str
    what: str
    number: str
    threshold: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureView:
    """What to know about a failed gate, and what to do; `more` says how many rows of evidence are left out."""

    gate: str
    proves: str
    measured: str
    threshold: str
    evidence: tuple[EvidenceRow, ...]
    more: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditView:
    """What an engineer needs to decide on a policy, in reading order."""

    headline: str
    passed: bool
    facts: tuple[tuple[str, str], ...]
    counts: tuple[tuple[str, int], ...]
    gates: tuple[GateRow, ...]
    failures: tuple[FailureView, ...]
    policy: str
    files: tuple[tuple[str, str], ...]


def audit_view(record: AuditRecord) -> AuditView:
    """Return the view of an audit."""
    return AuditView(
        headline=headline(record),
        passed=record.passed,
        facts=_facts(record),
        counts=tuple(
            (label, sum(gate.verdict == verdict for gate in record.gates))
            for verdict, label in (("pass", "passed"), ("fail", "failed"), ("not-applicable", "not applicable"))
        ),
        gates=tuple(_row(gate) for gate in record.gates),
        failures=tuple(_failure(gate) for gate in record.failed),
        policy=record.policy,
        files=(("record", record.record_file),),
    )


def headline(record: AuditRecord) -> str:
    """Return the outcome of an audit in one sentence."""
    failed, total = record.failed, len(record.gates)
    judged = sum(gate.verdict != "not-applicable" for gate in record.gates)
    if failed:
        names = ", ".join(gate.gate for gate in failed)
        return f"{record.policy_file} fails {len(failed)} of {_gates(judged)}: {names}"
    if judged == 0:
        return f"{record.policy_file}: none of {_gates(total)} applies, so nothing is proven"
    rest = f"; {total - judged} not applicable" if judged < total else ""
    return f"{record.policy_file} passes {'the gate' if judged == 1 else f'{judged} of {_gates(judged)}'}{rest}"


def _facts(record: AuditRecord) -> tuple[tuple[str, str], ...]:
    return (
        ("workload", record.workload),
        ("policy", f"{record.policy_file} ({record.policy_name})"),
        ("gates", record.gates_file or "defaults; autoprec audit --show-gates prints them"),
        ("device", f"{record.device.name} ({record.device.kind}), torch {record.versions.get('torch', '?')}"),
        ("audited", f"{record.created}, seed {record.seed}, in {seconds_text(record.wall_s)}"),
    )


def _gates(count: int) -> str:
    return f"{count} gate{'s' * (count != 1)}"


def _row(gate: GateRecord) -> GateRow:
    return GateRow(
        gate=gate.gate,
        state=gate.verdict,
        verdict=_VERDICTS[gate.verdict],
        measured=gate.measured,
        threshold=threshold_text(gate),
        proves=gate.proves,
        took=seconds_text(gate.wall_s) if gate.wall_s >= 0.01 else "",
        notes=gate.notes,
    )


def threshold_text(gate: GateRecord) -> str:
    """Return the threshold that the value of a gate was held against; an empty text without one.

    A unit may say which way it bounds after a comma: 2 in `x fp32, at most` is "at most 2 x fp32".
    """
    if gate.threshold is None:
        return ""
    unit, _, bound = gate.unit.partition(", ")
    return " ".join(part for part in (bound, number_text(gate.threshold), unit) if part)


def number_text(number: float | None) -> str:
    """Return a number in four digits, a whole one in full; an empty text for None."""
    if number is None:
        return ""
    return f"{number:.0f}" if math.isfinite(number) and number == int(number) else f"{number:.4g}"


def _failure(gate: GateRecord) -> FailureView:
    rest = len(gate.evidence) - _MOST_EVIDENCE
    return FailureView(
        gate=gate.gate,
        proves=gate.proves,
        measured=gate.measured,
        threshold=threshold_text(gate),
        evidence=tuple(_evidence(row) for row in gate.evidence[:_MOST_EVIDENCE] if row.what != gate.measured),
        more=f"and {rest} more in the record" if rest > 0 else "",
        advice=gate.advice,
    )


def _evidence(row: EvidenceRecord) -> EvidenceRow:
    return EvidenceRow(
        where=row.where, what=row.what, number=number_text(row.value), threshold=number_text(row.threshold)
    )
