"""`repeat`: two runs of the policy under one seed agree, and so do two audits."""

import math

from autoprec.audit.advice import mend_workload
from autoprec.audit.audited import Audited
from autoprec.audit.checkpoints import differences
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.gates.resume import apart_in_losses
from autoprec.audit.runs import LEGS, Legs, legs_of, load_checkpoint
from autoprec.errors import MeasurementError
from autoprec.measure import Ratio, interleave, speedup
from autoprec.policy import preset
from autoprec.records.audit import EvidenceRecord
from autoprec.search.baselines import coarsest_format, rounding_of

_MAX_NAMED = 10


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    legs = legs_of(thresholds)
    one, other = audited.runs.under_policy(legs), audited.runs.again(legs)
    one.require_finished()
    other.require_finished()
    assert one.end is not None
    assert other.end is not None
    apart = apart_in_losses(one.losses, other.losses)
    differ = list(differences(load_checkpoint(one.end), load_checkpoint(other.end)))
    timed = _timed(audited, int(thresholds["rounds"]))
    if not differ and apart == 0:
        return Finding(
            verdict="pass", measured=f"two runs of {legs.total} steps are equal bit for bit{timed}",
            value=0.0, threshold=0.0, unit="loss",
        )  # fmt: skip
    # A GPU adds in any order; a CPU does not, and there every difference is one of the workload's own.
    allowed = 0.0 if audited.device.kind == "cpu" else thresholds["times_chaos"] * _chaos(audited, legs)
    if apart <= allowed:
        measured = f"two runs differ by {apart:.3g} in the loss, a nudge by one rounding by {allowed:.3g}{timed}"
        return Finding(verdict="pass", measured=measured, value=apart, threshold=allowed, unit="loss")
    rows = [
        EvidenceRecord(where=where, what="differs at the end of two runs of one seed", value=value, threshold=0.0)
        for where, value in sorted(differ, key=lambda item: -item[1])[:_MAX_NAMED]
    ]
    step = next((n for n, pair in enumerate(zip(one.losses, other.losses, strict=True), 1) if pair[0] != pair[1]), None)
    if step is not None:
        what = f"step {step}: loss {one.losses[step - 1]:.9g}, then {other.losses[step - 1]:.9g}"
        rows.insert(0, EvidenceRecord(where="loss", what=what, value=apart, threshold=allowed))
    return _fail(
        audited, f"two runs of one seed differ by up to {apart:.3g} in the loss{timed}", tuple(rows), apart, allowed
    )


def _fail(
    audited: Audited, measured: str, rows: tuple[EvidenceRecord, ...], value: float | None = None,
    threshold: float | None = None,
) -> Finding:  # fmt: skip
    advice = mend_workload(
        audited, "draw all random numbers from torch, random or numpy, or seed generators in model()"
    )
    return Finding(
        verdict="fail", measured=measured, value=value, threshold=threshold, unit="loss", evidence=rows, advice=advice
    )


def _chaos(audited: Audited, legs: Legs) -> float:
    """Return how far a nudge of the first weights by one rounding of the policy moves its losses."""
    name = coarsest_format(audited.policy) or "fp32"
    nudged = audited.runs.nudged(legs, audited.policy, rounding_of(name))
    return apart_in_losses(audited.runs.under_policy(legs).losses, nudged.losses)


def _timed(audited: Audited, rounds: int) -> str:
    """Return what two measurements of the speed-up over FP32 say of each other; nothing hangs on it."""
    try:
        one, other = _speed(audited, rounds), _speed(audited, rounds)
    except MeasurementError as error:
        return f"; speed was not measured ({error})"
    overlap = one.low <= other.high and other.low <= one.high
    said = "overlap" if overlap else "do not overlap: the machine is not quiet"
    return f"; two measurements of the speed, {_interval(one)} and {_interval(other)} times FP32, {said}"


def _interval(ratio: Ratio) -> str:
    high = "inf" if math.isinf(ratio.high) else f"{ratio.high:.2f}"
    return f"{ratio.low:.2f} to {high}"


def _speed(audited: Audited, rounds: int) -> Ratio:
    batches = audited.runs.batches(1)
    with (
        audited.train(preset("fp32", audited.device.kind), batches) as fp32,
        audited.train(audited.policy, batches) as run,
    ):
        times = interleave(
            {"fp32": fp32, "policy": run}, rounds=rounds, steps_per_round=1, warmup=1, device=audited.device.kind
        )
    return speedup(times["fp32"], times["policy"])


REPEAT = Gate(
    name="repeat",
    proves="two runs of the policy under one seed agree, and a second audit comes to the same verdicts",
    check=_check,
    thresholds={
        **LEGS,
        "times_chaos": Threshold(
            default=2.0,
            unit="times",
            means="on devices that add in any order: losses may differ by this many times what one rounding of the "
            "first weights makes of them",
        ),
        "rounds": Threshold(
            default=6, unit="rounds", means="timed in each measurement of the speed", minimum=6, whole=True
        ),
    },
)
