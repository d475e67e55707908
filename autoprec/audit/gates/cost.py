"""`cost`: money per million samples, before and after, and energy where the device counts it."""

import math

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.paired import Paired
from autoprec.measure import Ratio
from autoprec.measure.step_time import MIN_ROUNDS
from autoprec.records.audit import EvidenceRecord

_SAMPLES = 1e6


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    paired, price = audited.paired, audited.price_per_hour
    if price is None:
        note = _energy(paired)
        return Finding(
            verdict="not-applicable",
            measured="no price is given; --price-per-hour says what an hour of the device costs",
            notes=(note,) if note else (),
        )
    ratio, most = paired.speedup, thresholds["max_ratio"]
    if ratio is None or ratio.num_rounds < MIN_ROUNDS:
        why = f"{', '.join(paired.emulated)} is emulated" if paired.emulated else paired.stopped or "too few rounds"
        return Finding(verdict="not-applicable", measured=f"not timed: {why}")
    before = price / 3600 * paired.reference_step_s / paired.num_samples * _SAMPLES
    after, low, high = (before / each if each else math.inf for each in (ratio.median, ratio.high, ratio.low))
    energy = _energy(paired)
    measured = (
        f"{after:.4g} per million samples ({low:.4g} to {high:.4g}), {before:.4g} in fp32, at {price:g} an hour and "
        f"{paired.num_samples} samples a step{f'; {energy}' if energy else ''}"
    )
    passed = _upper(ratio) <= most or (most == 1.0 and paired.is_tie)
    return Finding(
        verdict="pass" if passed else "fail",
        measured=measured,
        value=_upper(ratio),
        threshold=most,
        unit="x the cost of fp32, at most",
        evidence=()
        if passed
        else (EvidenceRecord(where="cost of a sample", what=measured, value=_upper(ratio), threshold=most),),
        advice="" if passed else f"train in fp32, or tune for this device: autoprec tune {audited.workload_name}",
    )


def _upper(ratio: Ratio) -> float:
    return 1 / ratio.low if ratio.low else math.inf


def _energy(paired: Paired) -> str:
    found = paired.energy
    if found is None:
        return ""
    return f"{found.candidate_j:.3g} J a step, {found.reference_j:.3g} J in fp32"


COST = Gate(
    name="cost",
    proves="a sample costs no more than in FP32, or as much less as was agreed",
    check=_check,
    thresholds={
        "max_ratio": Threshold(
            default=1.0,
            unit="x the cost of fp32",
            means="what the upper confidence bound of the cost of a sample may reach; at 1 a tie with FP32 passes too",
            minimum=0.001,
            maximum=1000.0,
        ),
    },
)
