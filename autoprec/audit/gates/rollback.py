"""`rollback`: a run can be taken from the policy to its fallback, and back, without a jump of the loss."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoprec.audit.advice import mend_file
from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.runs import LEGS, Course, Legs, legs_of
from autoprec.errors import AutoprecError
from autoprec.measure import compare
from autoprec.measure.steps_lost import pair
from autoprec.policy import LossScale, Parameters, Policy, Rule, SitePattern, resolve
from autoprec.records.audit import EvidenceRecord

_SWITCH = 4  # steps after a switch in which a jump shows
_SCATTER = 4.0  # medians that a difference may be away from zero by chance


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    legs, limit = legs_of(thresholds), thresholds["steps_lost"]
    fallback = fallback_policy(audited.policy)
    unfit = _unfit(audited, fallback)
    if unfit:
        return _failed(audited, fallback, f"the fallback cannot be installed: {unfit}", ())
    stayed = audited.runs.under_policy(legs)
    stayed.require_finished()
    assert stayed.saved is not None
    if stayed.broken_at is not None:
        broke = f"loss {stayed.losses[stayed.broken_at - 1]} at step {stayed.broken_at}"
        what = f"the run under the policy broke before there was anything to roll back to or compare with: {broke}"
        return _failed(audited, fallback, what, (EvidenceRecord(where="policy", what=broke),))
    # Back to the policy goes whoever fell back: the loss scale is the one that the policy had settled at.
    switches = (
        (f"policy to {fallback.name}", stayed, audited.runs.switched(legs, stayed.saved, fallback)),
        *_reverse(audited, fallback, legs, stayed.saved),
    )
    judged = [_judge(name, one, other, legs, limit) for name, one, other in switches]
    evidence = tuple(each.evidence for each in judged if each.evidence is not None)
    worst = max(judged, key=lambda each: each.steps)
    measured = "; ".join(each.said for each in judged)
    if evidence:
        return _failed(audited, fallback, measured, evidence, worst.steps, limit)
    return Finding(verdict="pass", measured=measured, value=worst.steps, threshold=limit, unit="steps")


def fallback_policy(policy: Policy) -> Policy:
    """Return what a run falls back to: the fallback's format where it wins, FP32 elsewhere, FP32 parameters.

    The loss scale stays where a site still computes in fp16.
    """
    rest = () if SitePattern(policy.fallback.sites).catches_all else (Rule(sites="*", format="fp32"),)
    return replace(
        policy,
        name=f"fallback ({policy.fallback.sites}: {policy.fallback.format})",
        rules=(policy.fallback, *rest),
        parameters=Parameters(),
        float32_matmul="ieee",
        loss_scale=policy.loss_scale if policy.fallback.format == "fp16" else LossScale(),
    )


def _unfit(audited: Audited, fallback: Policy) -> str:
    """Return why the fallback is none for this model and device, or an empty text."""
    try:
        audited.device.require(fallback)
        resolve(fallback, audited.recording.op_graph.sites()).check_alive()
    except AutoprecError as error:
        return str(error)
    return ""


def _reverse(audited: Audited, fallback: Policy, legs: Legs, scaler: Path) -> tuple[tuple[str, Course, Course], ...]:
    """Return the run that stayed under the fallback, beside the one that went on under the policy from its middle."""
    stayed = audited.runs.under_fallback(legs, fallback)
    name = f"{fallback.name} to policy"
    if stayed.saved is None or stayed.broken_at is not None:
        return ((name, stayed, stayed),)
    return ((name, stayed, audited.runs.switched(legs, stayed.saved, audited.policy, scaler)),)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """What a switch did: the steps it lost, one sentence, and a row if it failed."""

    steps: float
    said: str
    evidence: EvidenceRecord | None


def _judge(name: str, stayed: Course, went: Course, legs: Legs, limit: float) -> _Judged:
    """Return how a run that went on under another policy compares with the one that stayed."""
    broken = went.error or (
        f"loss {went.losses[went.broken_at - 1]} in step {went.broken_at}" if went.broken_at else ""
    )
    if not broken and stayed.broken_at is not None:
        broken = f"loss {stayed.losses[stayed.broken_at - 1]} in step {stayed.broken_at} of the run that stayed"
    if broken:
        said = f"{name}: {broken} after the switch"
        return _Judged(steps=math.inf, said=said, evidence=_row(name, said, math.inf, limit))
    candidate = (*stayed.losses[: legs.before], *went.losses)
    margin = min(limit / legs.total, 0.99)
    found = compare(stayed.losses, candidate, margin=margin)
    jump = _jump(stayed.losses, candidate, legs, margin)
    steps = max(found.steps_lost, jump)
    said = f"{name}: {jump:+.2f} steps in the first {_SWITCH}, {found.steps_lost:+.2f} at the end of {legs.after}"
    is_bad = jump > limit or found.verdict == "unfaithful"
    row = _row(name, f"{said}; {found.reason}", steps, limit) if is_bad else None
    return _Judged(steps=steps, said=said, evidence=row)


def _jump(stayed: Sequence[float], went: Sequence[float], legs: Legs, margin: float) -> float:
    """Return by how many steps the loss jumps at most in the first steps after a switch, beyond what rounding scatters.

    A step is worth what the run that stayed gains in one. Pairs see the same batches, so what scatter there is comes
    from rounding; its size is the median of all differences after the switch, which one jump does not move. A jump that
    lasts moves it, and the comparison of the curves sees that one.
    """
    apart = [went[step] - stayed[step] for step in range(legs.before, legs.total)]
    excess = max(max(apart[:_SWITCH]) - _SCATTER * statistics.median(map(abs, apart)), 0.0)
    worth = pair(stayed, went, margin).worth
    return excess / worth if worth else (math.inf if excess else 0.0)


def _row(where: str, what: str, value: float, limit: float) -> EvidenceRecord:
    return EvidenceRecord(where=where, what=what, value=value, threshold=limit)


def _failed(
    audited: Audited, fallback: Policy, measured: str, evidence: tuple[EvidenceRecord, ...],
    value: float | None = None, threshold: float | None = None,
) -> Finding:  # fmt: skip
    rows = evidence or (EvidenceRecord(where=f"fallback {audited.policy.fallback.sites}", what=measured),)
    is_plain = set(fallback.formats) <= {"fp32"} and not measured.startswith("the fallback")
    change = "keep more sites in fp32" if is_plain else 'write fallback: {sites: "*", format: fp32}'
    return Finding(
        verdict="fail", measured=measured, value=value, threshold=threshold, unit="steps", evidence=rows,
        advice=mend_file(audited, change),
    )  # fmt: skip


ROLLBACK = Gate(
    name="rollback",
    proves="a run can go on under the fallback from any checkpoint, and back, without a jump of the loss",
    check=_check,
    thresholds={
        **LEGS,
        "steps_lost": Threshold(
            default=3.0,
            unit="steps",
            means="most that a switch may cost: the fidelity margin of 1 % on a horizon of 300 steps",
        ),
    },
)
