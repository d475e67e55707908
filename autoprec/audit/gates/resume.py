"""`resume`: a run that goes on from a checkpoint equals the one that was never interrupted."""

from autoprec.audit.advice import mend_workload
from autoprec.audit.audited import Audited
from autoprec.audit.checkpoints import differences
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.runs import LEGS, Course, Legs, legs_of, load_checkpoint
from autoprec.records.audit import EvidenceRecord

_MAX_NAMED = 10


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    legs = legs_of(thresholds)
    whole = audited.runs.under_policy(legs)
    whole.require_finished()
    assert whole.end is not None
    resumed = audited.runs.resumed(legs)
    if resumed.end is None:
        return _failed(audited, f"the run that went on from the checkpoint raised {resumed.error}")
    apart = apart_in_losses(whole.losses[legs.before :], resumed.losses)
    differ = list(differences(load_checkpoint(whole.end), load_checkpoint(resumed.end)))
    if not differ and apart == 0:
        return _passed(legs, "bit for bit: losses, parameters, optimizer state and loss scale", 0.0, 0.0)
    allowed = thresholds["times_own"] * _own(audited, legs)
    if apart <= allowed:
        measured = (
            f"as two uninterrupted runs equal each other: losses differ by {apart:.3g}, theirs by up to {allowed:.3g}"
        )
        return _passed(legs, measured, apart, allowed)
    return Finding(
        verdict="fail",
        measured=f"the continued run differs from the uninterrupted one: losses by up to {apart:.3g}",
        value=apart,
        threshold=allowed,
        unit="loss",
        evidence=_evidence(whole, resumed, legs, differ),
        advice=mend_workload(
            audited, "keep all that the run depends on in state dicts (register_buffer, Optimizer.state)"
        ),
    )


def _passed(legs: Legs, how: str, value: float, threshold: float) -> Finding:
    measured = (
        f"a run saved after {legs.before} steps and loaded equals the uninterrupted one for {legs.after} more, {how}"
    )
    return Finding(verdict="pass", measured=measured, value=value, threshold=threshold, unit="loss")


def _failed(audited: Audited, measured: str) -> Finding:
    evidence = (EvidenceRecord(where="checkpoint", what=measured),)
    advice = mend_workload(audited, "mend what it says")
    return Finding(verdict="fail", measured=measured, evidence=evidence, advice=advice)


def _own(audited: Audited, legs: Legs) -> float:
    """Return how far two uninterrupted runs are apart: nothing on a device that computes the same each time."""
    return apart_in_losses(audited.runs.under_policy(legs).losses, audited.runs.again(legs).losses)


def apart_in_losses(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the largest difference of paired losses; infinite where one of two is missing or not finite."""
    if len(one) != len(other):
        return float("inf")
    pairs = ((left, right) for left, right in zip(one, other, strict=True) if repr(left) != repr(right))
    return max((_gap(left, right) for left, right in pairs), default=0.0)


def _gap(left: float, right: float) -> float:
    gap = abs(left - right)
    return gap if gap == gap else float("inf")  # noqa: PLR0124 NaN


def _evidence(
    whole: Course, resumed: Course, legs: Legs, differ: list[tuple[str, float]]
) -> tuple[EvidenceRecord, ...]:
    after = whole.losses[legs.before :]
    first = next((step for step, pair in enumerate(zip(after, resumed.losses, strict=True)) if _gap(*pair)), None)
    rows = []
    if first is not None:
        what = (
            f"step {first + 1} after the checkpoint: loss {resumed.losses[first]:.9g}, uninterrupted {after[first]:.9g}"
        )
        rows.append(
            EvidenceRecord(where="loss", what=what, value=_gap(after[first], resumed.losses[first]), threshold=0.0)
        )
    parts = sorted(differ, key=lambda item: -item[1])
    rows += [
        EvidenceRecord(where=where, what="differs at the end", value=value, threshold=0.0)
        for where, value in parts[:_MAX_NAMED]
    ]
    return tuple(rows)


RESUME = Gate(
    name="resume",
    proves="a run saved and loaded in the middle goes on as if it had not been interrupted",
    check=_check,
    thresholds={
        **LEGS,
        "times_own": Threshold(
            default=4.0,
            unit="times",
            means="losses may differ by this many times what two uninterrupted runs differ by, "
            "so not at all where these agree",
        ),
    },
)
