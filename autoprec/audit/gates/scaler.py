"""`scaler`: the loss scale settles, skips few steps, and neither collapses nor grows without bound."""

import math
from collections.abc import Sequence

from autoprec.audit.advice import mend_file
from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.gates.headroom import settled_scale
from autoprec.audit.runs import LEGS, Course, legs_of
from autoprec.audit.site_reach import SiteReach
from autoprec.numerics import format_named
from autoprec.policy import LossScale
from autoprec.records.audit import EvidenceRecord

_BATCHES = 3  # as many as the headroom gate measures by default, so that both share them


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    given, legs = audited.policy.loss_scale, legs_of(thresholds)
    reaches = audited.runs.reach(None, _BATCHES, legs, settled_scale(audited, legs)) if audited.runs.ran_as() else ()
    if given.kind == "none":
        return Finding(verdict="not-applicable", measured=_without(reaches))
    course = audited.runs.under_policy(legs)
    course.require_finished()
    bound = _bound(given, reaches)
    evidence = (
        *_settling(course, thresholds),
        *_collapse(course, given, thresholds),
        *_growth(course, bound, thresholds),
    )
    skipped, settled = sum(course.skipped), _settled_at(course)
    return Finding(
        verdict="fail" if evidence else "pass",
        measured=f"loss scale {course.scales[0]:g} to {course.scales[-1]:g} in {legs.total} steps; {skipped} skipped, "
        f"{settled} before the first that was taken; it can grow to {bound:.4g}",
        value=skipped / legs.total,
        threshold=thresholds["skipped_frac"],
        unit="fraction of steps",
        evidence=evidence,
        advice=_advice(audited, course, evidence),
    )


def _without(reaches: Sequence[SiteReach]) -> str:
    """Return whether gradients would need a loss scale, for a policy that has none."""
    narrow = [each for each in reaches if each.kind == "gradient" and each.format == "fp16"]
    if not narrow:
        return "no loss scale, and no gradient in fp16 that needs one"
    most = max(narrow, key=lambda each: each.flushed_norm)
    needed = "a loss scale is missing" if most.flushed_norm > 0.1 else "none is needed"
    return (
        f"no loss scale; of the gradients in fp16 at most {most.flushed_norm:.1%} of the norm rounds to zero, at "
        f"{most.where}: {needed}"
    )


def _settled_at(course: Course) -> int:
    """Return how many steps were skipped before the first that was taken."""
    return next((index for index, skipped in enumerate(course.skipped) if not skipped), len(course.skipped))


def _settling(course: Course, thresholds: Thresholds) -> list[EvidenceRecord]:
    settled = _settled_at(course)
    rest = course.skipped[settled:]
    found = []
    if settled > thresholds["settling_steps"]:
        what = f"{settled} steps were skipped before the first that was taken"
        found.append(_row(what, settled, thresholds["settling_steps"]))
    if rest and sum(rest) / len(rest) > thresholds["skipped_frac"]:
        what = f"{sum(rest)} of {len(rest)} steps were skipped after the first that was taken"
        found.append(_row(what, sum(rest) / len(rest), thresholds["skipped_frac"]))
    return found


def _collapse(course: Course, given: LossScale, thresholds: Thresholds) -> list[EvidenceRecord]:
    """Return whether a step overflowed at a scale that is too small to be worth having."""
    floor = max(given.minimum, thresholds["smallest_scale"]) if given.kind == "dynamic" else given.initial
    skipped_at = [scale for scale, skipped in zip(course.scales, course.skipped, strict=True) if skipped]
    if given.kind == "static":
        return (
            [] if not all(course.skipped) else [_row(f"every step overflows at the static scale {floor:g}", 1.0, 0.0)]
        )
    if not skipped_at or min(skipped_at) > floor:
        return []
    what = f"collapsed: a step overflowed at scale {min(skipped_at):g}, and no smaller one helps"
    return [_row(what, min(skipped_at), floor)]


def _bound(given: LossScale, reaches: Sequence[SiteReach]) -> float:
    """Return the largest scale there can be: the policy's, or the one at which a gradient in fp16 overflows."""
    if given.kind == "static":
        return given.initial
    largest = max(
        (each.largest / each.scale for each in reaches if each.kind == "gradient" and each.format == "fp16"),
        default=0.0,
    )
    return min(given.maximum, given.growth_factor * format_named("fp16").max / largest) if largest else given.maximum


def _growth(course: Course, bound: float, thresholds: Thresholds) -> list[EvidenceRecord]:
    limit, largest = thresholds["largest_scale"], max((bound, *course.scales))
    if largest <= limit and math.isfinite(largest):
        return []
    return [_row(f"nothing stops it below {largest:.4g}: no gradient in fp16 overflows before", largest, limit)]


def _row(what: str, value: float, threshold: float) -> EvidenceRecord:
    return EvidenceRecord(where="loss_scale", what=what, value=value, threshold=threshold)


def _advice(audited: Audited, course: Course, evidence: Sequence[EvidenceRecord]) -> str:
    if not evidence:
        return ""
    if "nothing stops" in evidence[-1].what:
        return mend_file(audited, "write loss_scale.maximum: 16777216")
    if any("collapsed" in row.what for row in evidence):
        return mend_file(audited, "keep the site that precision.find_overflow(batch) names in fp32")
    return mend_file(audited, f"write loss_scale.initial: {min(course.scales):g}, or a longer growth_interval,")


SCALER = Gate(
    name="scaler",
    proves="the loss scale settles and skips few steps, and neither collapses nor grows without bound",
    check=_check,
    thresholds={
        **LEGS,
        "settling_steps": Threshold(
            default=10, unit="steps", means="most steps that may be skipped before one is taken", whole=True
        ),
        "skipped_frac": Threshold(
            default=0.1, unit="fraction", means="most of the steps after that which may be skipped", maximum=1.0
        ),
        "smallest_scale": Threshold(default=1.0, unit="scale", means="a step that overflows here is a collapse"),
        "largest_scale": Threshold(default=2.0**60, unit="scale", means="the scale must not be able to grow further"),
    },
)
