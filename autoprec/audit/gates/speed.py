"""`speed`: the policy is as fast as was agreed, in interleaved rounds against FP32."""

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.measure.step_time import MIN_ROUNDS
from autoprec.records.audit import EvidenceRecord
from autoprec.records.quantities import seconds_text


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    paired, least = audited.paired, thresholds["min_speedup"]
    if paired.emulated:
        names = ", ".join(paired.emulated)
        return Finding(
            verdict="not-applicable",
            measured=f"not timed: {names} is emulated on {audited.device.name}, which says nothing about speed",
        )
    ratio = paired.speedup
    if ratio is None:
        return _failed(audited, f"not timed: {paired.stopped}", 0.0, least)
    if ratio.num_rounds < MIN_ROUNDS:
        return _too_few_rounds(audited, ratio.num_rounds)
    step = paired.reference_step_s
    measured = (
        f"{ratio.median:.2f}x fp32 ({ratio.low:.2f} to {ratio.high:.2f} in {ratio.num_rounds} rounds), "
        f"{seconds_text(step / ratio.median)} a step beside {seconds_text(step)}"
    )
    is_tie = least == 1.0 and paired.is_tie
    if ratio.low >= least or is_tie:
        measured += "; a tie" if ratio.low < least else ""
        return Finding(verdict="pass", measured=measured, value=ratio.low, threshold=least, unit="x fp32, at least")
    return _failed(audited, measured, ratio.low, least)


def _too_few_rounds(audited: Audited, rounds: int) -> Finding:
    if audited.paired.stopped:
        return Finding(verdict="not-applicable", measured=f"not timed: {audited.paired.stopped}")
    return Finding(
        verdict="fail",
        measured=f"{rounds} rounds bound no speed-up, and {MIN_ROUNDS} are needed",
        value=rounds,
        threshold=MIN_ROUNDS,
        unit="rounds, at least",
        advice=f"train longer: write {{horizon: 100}} under fidelity in {audited.gates_name} and audit again",
    )


def _failed(audited: Audited, measured: str, value: float, least: float) -> Finding:
    return Finding(
        verdict="fail",
        measured=measured,
        value=value,
        threshold=least,
        unit="x fp32, at least",
        evidence=(EvidenceRecord(where="step time", what=measured, value=value, threshold=least),),
        advice=(
            f"see which policy is faster here: autoprec bench {audited.workload_name} --policy "
            f"{audited.policy_text}; on a machine that others use, audit again when it is quiet"
        ),
    )


SPEED = Gate(
    name="speed",
    proves="the policy is not slower than FP32, or as much faster as was agreed",
    check=_check,
    thresholds={
        "min_speedup": Threshold(
            default=1.0,
            unit="x fp32",
            means="what the lower confidence bound of the speed-up must reach; at 1 a tie with FP32 passes too",
            maximum=1000.0,
        ),
    },
)
