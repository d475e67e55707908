"""One audit: every gate measured in turn, each verdict written down."""

import time
from collections.abc import Mapping, Sequence

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Gate, Thresholds
from autoprec.records.audit import GateRecord


def run_gates(gates: Sequence[Gate], audited: Audited, thresholds: Mapping[str, Thresholds]) -> tuple[GateRecord, ...]:
    """Return the verdict of each gate; `thresholds` holds, by gate, what differs from the defaults."""
    return tuple(_run(gate, audited, {**gate.defaults, **thresholds.get(gate.name, {})}) for gate in gates)


def _run(gate: Gate, audited: Audited, thresholds: Thresholds) -> GateRecord:
    started = time.monotonic()
    found = gate.check(audited, thresholds)
    return GateRecord(
        gate=gate.name,
        proves=gate.proves,
        verdict=found.verdict,
        measured=found.measured,
        value=found.value,
        threshold=found.threshold,
        unit=found.unit,
        thresholds=dict(thresholds),
        evidence=found.evidence,
        advice=found.advice,
        wall_s=time.monotonic() - started,
    )
