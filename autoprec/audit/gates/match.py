"""`match`: the policy still fits what it was tuned for, in the way of a lockfile: what changed is named."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.lock_changes import Aspect, Change, lock_changes
from autoprec.graph.float8 import float8_faults
from autoprec.policy import SitePattern
from autoprec.records.audit import EvidenceRecord
from autoprec.search.policy_lock import policy_lock

_ALL_PARTS = 9


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    now = policy_lock(audited.recording.op_graph, audited.device)
    then = _lock(audited)
    parts = int(thresholds["torch"])
    changes = lock_changes(then, now, torch_parts=_ALL_PARTS)
    counted = {(change.where, change.what) for change in lock_changes(then, now, torch_parts=parts)}
    counts = [c for c in changes if (c.where, c.what) in counted and (c.aspect == "torch" or thresholds[c.aspect])]
    faults = (*_faulty_rules(audited), *(_row(change) for change in counts))
    notes = (*_unknown(audited, then), *(_noted(change) for change in changes if change not in counts))
    return Finding(
        verdict="fail" if faults else "pass",
        measured=_measured(audited, faults, counts, then, now),
        value=len(faults),
        threshold=0,
        unit="differences, at most",
        evidence=faults,
        advice=_advice(audited, counts) if faults else "",
        notes=notes,
    )


def _lock(audited: Audited) -> Mapping[str, Any]:
    """Return what the policy says it was tuned for: its lock, or of older and written ones what stands in the file."""
    evidence, policy = audited.evidence, audited.policy
    lock = evidence.get("lock")
    if isinstance(lock, Mapping):
        return lock
    versions = evidence.get("versions")
    found = {
        "graph": evidence.get("graph"),
        "device": dict(policy.device) or None,
        "torch": versions.get("torch") if isinstance(versions, Mapping) else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _faulty_rules(audited: Audited) -> Iterator[EvidenceRecord]:
    """Yield the rules that win nowhere, and the shapes that FP8 kernels refuse; a preset names every op there is."""
    for fault in float8_faults(audited.resolved, audited.recording.op_graph):
        yield EvidenceRecord(where="fp8", what=fault)
    if audited.policy_file is None:
        return
    sites = audited.resolved.winners
    for index in audited.resolved.dead_rules:
        pattern = SitePattern(audited.policy.rules[index].sites)
        kind = "doubly won" if any(pattern.matches(site) for site in sites) else "dead"
        yield EvidenceRecord(
            where=f"{audited.policy_file}:{audited.rule_lines[index]}",
            what=f"{kind}: {audited.resolved.explain_dead(index)}",
        )


def _measured(
    audited: Audited,
    faults: tuple[EvidenceRecord, ...],
    changes: list[Change],
    then: Mapping[str, Any],
    now: Mapping[str, Any],
) -> str:
    if not faults:
        sites = f"{len(audited.resolved.winners)} sites resolved, no rule dead or doubly won"
        return f"graph {now['graph']} is the one that was tuned; {sites}" if "graph" in then else sites
    by_aspect = {aspect: [change.where for change in changes if change.aspect == aspect] for aspect in get_args(Aspect)}
    parts = [f"{aspect} ({_some(names)})" for aspect, names in by_aspect.items() if names]
    num_rules = len(faults) - len(changes)
    parts += [f"{num_rules} rule{'s' * (num_rules != 1)} of the policy"] * bool(num_rules)
    return f"not as it was tuned: {', '.join(parts)}" if changes else f"wrong: {', '.join(parts)}"


def _some(names: list[str]) -> str:
    rest = len(names) - 2
    return ", ".join(names[:2]) + (f" and {rest} more" if rest > 0 else "")


def _advice(audited: Audited, changes: list[Change]) -> str:
    if not changes:
        return f"mend the rules, then see: autoprec policy check {audited.policy_text} {audited.workload_name}"
    aspects = ", ".join(dict.fromkeys(f"{change.aspect}: 0" for change in changes))
    return (
        f"tune again: autoprec tune {audited.workload_name} --out {audited.policy_text}; or, if the change is meant "
        f"and the other gates pass, write {{{aspects}}} under match in {audited.gates_name}"
    )


def _unknown(audited: Audited, then: Mapping[str, Any]) -> Iterator[str]:
    if "lock" in audited.evidence:
        return
    said = f"it says {', '.join(then)} of what it was tuned for, and no more" if then else "nothing says what it is for"
    yield f"the policy has no lock: {said}; other changes cannot be seen. autoprec tune writes one"


def _row(change: Change) -> EvidenceRecord:
    return EvidenceRecord(where=change.where, what=change.what)


def _noted(change: Change) -> str:
    return f"{change.where} {change.what}, which is allowed"


def _switch(means: str) -> Threshold:
    return Threshold(
        default=1, unit="", means=f"{means}: 1 fails where they changed, 0 only notes it", maximum=1, whole=True
    )


MATCH = Gate(
    name="match",
    proves="the policy still fits the model, device and versions that it was tuned for",
    check=_check,
    thresholds={
        "architecture": _switch("the sites, the parameters and what reads what"),
        "shapes": _switch("the shapes of the batch and of parameters"),
        "device": _switch("the kind and the name of the device"),
        "torch": Threshold(
            default=2,
            unit="numbers of the version",
            means="how much of torch's version must be the same: 0 nothing, 2 as in 2.13, 3 the patch too",
            maximum=3,
            whole=True,
        ),
        "autocast": _switch("torch's autocast lists"),
        "flags": _switch("torch's flags: FP32 precision, determinism, cudnn"),
    },
)
