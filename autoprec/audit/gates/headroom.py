"""`headroom`: no number of a site below FP32 is near the end of its format, and none drifts towards it."""

import math
from collections.abc import Sequence
from pathlib import Path

from autoprec.audit.advice import keep_wide, mend_file
from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.runs import HELD_OUT, LEGS, Legs, legs_of
from autoprec.audit.site_reach import SiteReach
from autoprec.records.audit import EvidenceRecord

_NOTICEABLE = 0.1  # powers of two, or fractions of a norm: what the largest of a few batches varies by itself
_MAX_NAMED = 10


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    legs, count = legs_of(thresholds), int(thresholds["batches"])
    if not audited.runs.ran_as() and audited.policy.parameters.storage not in ("bf16", "fp16"):
        return Finding(verdict="not-applicable", measured="no site computes in bf16 or fp16, so none has less range")
    scale = settled_scale(audited, legs)
    weights = audited.checkpoints[-1] if audited.checkpoints else None
    reaches = audited.runs.reach(weights, count, legs, scale)
    failed = [*_too_near(audited, reaches, thresholds, scale), *_flushed(reaches, thresholds)]
    drift = _drift(audited, reaches, thresholds, scale)
    least = reaches[0] if reaches else None
    measured = _measured(reaches, count, scale) + _drift_said(audited, drift)
    evidence = tuple(row for _, row in (*failed, *drift))[:_MAX_NAMED]
    return Finding(
        verdict="fail" if evidence else "pass",
        measured=measured,
        value=None if least is None or math.isinf(least.headroom) else least.headroom,
        threshold=thresholds["headroom"],
        unit="powers of two",
        evidence=evidence,
        advice=_advice(audited, (*failed, *drift)),
    )


def settled_scale(audited: Audited, legs: Legs) -> float:
    """Return the loss scale at the end of the run under the policy; 1 without one."""
    scales = audited.runs.under_policy(legs).scales
    return scales[-1] if scales else audited.policy.loss_scale.initial


def _too_near(
    audited: Audited, reaches: Sequence[SiteReach], thresholds: Thresholds, scale: float
) -> list[tuple[SiteReach, EvidenceRecord]]:
    """Return what has less headroom than asked, least first.

    A dynamic loss scale backs off from an overflow of the gradients, so these count at the smallest scale it has.
    """
    given = audited.policy.loss_scale
    spare = math.log2(scale / max(given.minimum, 1.0)) if given.kind == "dynamic" and scale >= 1 else 0.0
    limit = thresholds["headroom"]
    found = [(each, each.headroom + (spare if each.kind == "gradient" else 0.0)) for each in reaches]
    return [(each, _row(each, room, limit)) for each, room in sorted(found, key=lambda it: it[1]) if room < limit]


def _row(reach: SiteReach, room: float, limit: float) -> EvidenceRecord:
    what = f"{reach.what} in {reach.format}: largest {reach.largest:.4g}, {room:.2f} powers of two below its limit"
    if room < 0:
        what = f"{reach.what} in {reach.format}: largest {reach.largest:.4g} is beyond its limit"
    return EvidenceRecord(where=reach.where, what=what, value=room, threshold=limit)


def _flushed(reaches: Sequence[SiteReach], thresholds: Thresholds) -> list[tuple[SiteReach, EvidenceRecord]]:
    """Return the gradients too much of whose norm rounds to zero, worst first."""
    limit = thresholds["flushed_norm"]
    found = [each for each in reaches if each.kind == "gradient" and each.flushed_norm > limit]
    return [(each, _flushed_row(each, limit)) for each in sorted(found, key=lambda each: -each.flushed_norm)]


def _flushed_row(reach: SiteReach, limit: float) -> EvidenceRecord:
    return EvidenceRecord(
        where=reach.where,
        what=f"gradient in {reach.format}: {reach.flushed_frac:.1%} of its elements and {reach.flushed_norm:.1%} of "
        "its norm round to zero",
        value=reach.flushed_norm,
        threshold=limit,
    )


def _drift(
    audited: Audited, newer: Sequence[SiteReach], thresholds: Thresholds, scale: float
) -> list[tuple[SiteReach, EvidenceRecord]]:
    """Return what will leave its format if the change between the last two checkpoints goes on, soonest first."""
    before = _before(audited.checkpoints)
    if before is None:
        return []
    older = audited.runs.reach(before, int(thresholds["batches"]), legs_of(thresholds), scale)
    known = {(each.where, each.what): each for each in older}
    found = []
    for each in newer:
        old = known.get((each.where, each.what))
        if old is None or not (math.isfinite(old.headroom) and math.isfinite(each.headroom)):
            continue
        if each.kind != "gradient" or audited.policy.loss_scale.kind != "dynamic":
            found += _used_up(each, old, thresholds)
        if each.kind == "gradient":
            found += _flushing(each, old, thresholds)
    return sorted(found, key=lambda item: item[1].value or 0.0)


def _before(checkpoints: Sequence[Path]) -> Path | None:
    return checkpoints[-2] if len(checkpoints) > 1 else None


def _used_up(new: SiteReach, old: SiteReach, thresholds: Thresholds) -> list[tuple[SiteReach, EvidenceRecord]]:
    lost, limit = old.headroom - new.headroom, thresholds["drift_intervals"]
    if lost <= _NOTICEABLE or new.headroom / lost >= limit:
        return []
    left = max(new.headroom / lost, 0.0)
    what = (
        f"{new.what} in {new.format} lost {lost:.2f} powers of two of headroom between the checkpoints and has "
        f"{new.headroom:.2f} left: used up in {left:.1f} such intervals"
    )
    return [(new, EvidenceRecord(where=new.where, what=what, value=left, threshold=limit))]


def _flushing(new: SiteReach, old: SiteReach, thresholds: Thresholds) -> list[tuple[SiteReach, EvidenceRecord]]:
    gained, limit, allowed = (
        new.flushed_norm - old.flushed_norm,
        thresholds["drift_intervals"],
        thresholds["flushed_norm"],
    )
    if gained <= _NOTICEABLE * allowed or (allowed - new.flushed_norm) / gained >= limit:
        return []
    left = max((allowed - new.flushed_norm) / gained, 0.0)
    what = (
        f"gradient in {new.format}: the part of its norm that rounds to zero grew from {old.flushed_norm:.1%} to "
        f"{new.flushed_norm:.1%} between the checkpoints: beyond {allowed:.0%} in {left:.1f} such intervals"
    )
    return [(new, EvidenceRecord(where=new.where, what=what, value=left, threshold=limit))]


def _measured(reaches: Sequence[SiteReach], count: int, scale: float) -> str:
    parts = []
    for kind in ("activation", "gradient", "parameter"):
        least = next((each for each in reaches if each.kind == kind and math.isfinite(each.headroom)), None)
        if least is not None:
            parts.append(f"{kind} {least.headroom:.1f} at {least.where} ({least.format})")
    most = max((each.flushed_norm for each in reaches if each.kind == "gradient"), default=0.0)
    at = f"at loss scale {scale:g} " if scale != 1 else ""
    least_said = "; ".join(parts) or "all numbers are zero"
    return (
        f"least headroom over {count} held-out batches {at}in powers of two: {least_said}; at most {most:.2%} of the "
        "norm of a gradient rounds to zero"
    )


def _drift_said(audited: Audited, drift: Sequence[object]) -> str:
    if len(audited.checkpoints) < 2:
        return ""
    names = " and ".join(path.name for path in audited.checkpoints[-2:])
    return f"; between {names} " + (f"{len(drift)} numbers drift towards an end" if drift else "nothing drifts")


def _advice(audited: Audited, failed: Sequence[tuple[SiteReach, EvidenceRecord]]) -> str:
    if not failed:
        return ""
    first, row = failed[0]
    if first.kind == "gradient" and "zero" in row.what and audited.policy.loss_scale.kind == "none":
        return mend_file(audited, "write loss_scale: {kind: dynamic}")
    if first.kind == "gradient" and audited.policy.loss_scale.kind == "static" and "zero" not in row.what:
        return mend_file(audited, "write a smaller loss_scale.initial, or kind: dynamic,")
    if first.kind == "parameter" and first.what.endswith("stored"):
        return mend_file(audited, f'write parameters: {{storage: fp32}}, or keep: ["{first.where}"]')
    site = first.what.rpartition(" at ")[2] if " at " in first.what else first.where
    return keep_wide(audited, site)


HEADROOM = Gate(
    name="headroom",
    proves="the largest activations, gradients and parameters have room in their formats, and small ones do not vanish",
    check=_check,
    thresholds={
        **LEGS,
        "headroom": Threshold(
            default=1.0, unit="powers of two", means="least distance of any number from the end of its format"
        ),
        "flushed_norm": Threshold(
            default=0.1, unit="fraction", means="most of the norm of a gradient that may round to zero", maximum=1.0
        ),
        "batches": Threshold(
            default=3, unit="batches", means="held-out batches measured", minimum=1, maximum=HELD_OUT, whole=True
        ),
        "drift_intervals": Threshold(
            default=4.0, unit="intervals", means="least number of times that the change between checkpoints may repeat"
        ),
    },
)
