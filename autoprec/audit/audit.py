"""One audit: every gate measured in turn, each verdict written down."""

import time
from collections.abc import Iterable, Mapping, Sequence

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Thresholds
from autoprec.errors import AutoprecError, WorkloadError
from autoprec.records.audit import GateRecord
from autoprec.search.observer import Observer
from autoprec.workload.origin import is_users, origin


def run_gates(
    gates: Sequence[Gate],
    audited: Audited,
    thresholds: Mapping[str, Thresholds],
    *,
    off: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> tuple[GateRecord, ...]:
    """Return the verdict of each gate; `thresholds` holds, by gate, what differs from the defaults.

    `off` holds, by gate, where it was turned off: such a gate is not applicable, and not measured. A gate that cannot
    be measured because the policy, or the workload under it, raises has failed: what cannot be seen is not proven.

    Raises: `WorkloadError` for a workload that is broken in FP32 too.
    """
    watch, done = observer or Observer(), list[GateRecord]()
    for gate in gates:
        given = {**gate.defaults, **thresholds.get(gate.name, {})}
        if off and gate.name in off:
            found = Finding(verdict="not-applicable", measured=f"turned off on {off[gate.name]}")
            done.append(_record(gate, found, given, 0.0))
            continue
        watch.stage(gate.name)
        started = time.monotonic()
        found = _found(gate, audited, given, done)
        done.append(_record(gate, found, given, time.monotonic() - started))
    return tuple(done)


def _found(gate: Gate, audited: Audited, thresholds: Thresholds, done: Iterable[GateRecord]) -> Finding:
    try:
        return gate.check(audited, thresholds)
    except WorkloadError:
        raise
    except Exception as error:
        if not isinstance(error, AutoprecError) and not is_users(error):
            raise
        return _unmeasured(error, audited, done)


def _unmeasured(error: Exception, audited: Audited, done: Iterable[GateRecord]) -> Finding:
    """Return a failure, unless the policy cannot be installed at all and an earlier gate has failed by that."""
    failed = [record.gate for record in done if record.verdict == "fail"]
    if failed and audited.obstacle:
        return Finding(verdict="not-applicable", measured=f"not measured: the policy cannot run here, see {failed[0]}")
    where = "" if isinstance(error, AutoprecError) else f"{origin(error) or 'the workload'}: {type(error).__name__}: "
    policy = audited.policy_text
    return Finding(
        verdict="fail",
        measured=f"not measured: {where}{error}",
        advice=f"mend what it says, then see: autoprec policy trace {audited.workload_name} --policy {policy}",
    )


def _record(gate: Gate, found: Finding, thresholds: Thresholds, wall_s: float) -> GateRecord:
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
        wall_s=wall_s,
        notes=found.notes,
    )
