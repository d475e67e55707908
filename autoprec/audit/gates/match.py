"""`match`: the policy still fits the model it was tuned for."""

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Thresholds


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    del thresholds
    written, found = audited.evidence.get("graph"), audited.recording.op_graph.fingerprint()
    if written is None:
        return Finding(verdict="not-applicable", measured="the policy does not say which graph it was tuned for")
    if written == found:
        return Finding(verdict="pass", measured=f"graph {found} is the one that was tuned")
    return Finding(
        verdict="fail",
        measured=f"the policy was tuned for graph {written}, and the workload now has {found}",
        advice=f"tune again: autoprec tune {audited.loaded.path}",
    )


MATCH = Gate(
    name="match",
    proves="the policy still fits the model, device and versions that it was tuned for",
    check=_check,
)
