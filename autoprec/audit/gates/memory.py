"""`memory`: one copy of the run under the policy needs no more memory than was agreed."""

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.measure import MemoryUse
from autoprec.records.audit import EvidenceRecord
from autoprec.records.quantities import bytes_text

_PARTS = {
    "parameter_bytes": "parameters and buffers",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "saved_bytes": "kept for the backward pass",
}


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    paired, most = audited.paired, thresholds["max_ratio"]
    if not paired.memory:
        return Finding(verdict="not-applicable", measured=f"not measured: {paired.stopped}")
    ours, fp32 = paired.memory["policy"], paired.memory["fp32"]
    ratio = ours.total_bytes / max(fp32.total_bytes, 1)
    passed = ratio <= most
    return Finding(
        verdict="pass" if passed else "fail",
        measured=f"{ratio:.2f}x fp32: {bytes_text(ours.total_bytes)} beside {bytes_text(fp32.total_bytes)}",
        value=ratio,
        threshold=most,
        unit="x fp32, at most",
        evidence=() if passed else _parts(ours, fp32),
        advice=""
        if passed
        else f"allow it with max_ratio under memory in {audited.gates_name}, or look for what it stores: "
        f"autoprec policy show {audited.policy_text}",
    )


def _parts(ours: MemoryUse, fp32: MemoryUse) -> tuple[EvidenceRecord, ...]:
    """Return what grew, most first."""
    grown = {name: getattr(ours, name) - getattr(fp32, name) for name in _PARTS}
    return tuple(
        EvidenceRecord(
            where=_PARTS[name],
            what=f"{bytes_text(getattr(ours, name))}, and {bytes_text(getattr(fp32, name))} in fp32",
            value=getattr(ours, name),
            threshold=getattr(fp32, name),
        )
        for name in sorted(grown, key=lambda name: -grown[name])
        if grown[name] > 0
    )


MEMORY = Gate(
    name="memory",
    proves="a run under the policy needs no more memory than was agreed",
    check=_check,
    thresholds={
        "max_ratio": Threshold(
            default=1.1,
            unit="x fp32",
            means="how much memory of FP32's one copy of the run may need: parameters, gradients, optimizer state and "
            "what is kept for the backward pass",
            minimum=0.01,
            maximum=100.0,
        ),
    },
)
