"""Findings: what somebody should do something about, most harmful first."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoprec.analysis.diagnosis import Diagnosis, kernel_reason
from autoprec.analysis.loss_scale import LossScaleAdvice
from autoprec.analysis.marks import Mark, ReasonCode
from autoprec.analysis.storage import (
    Storage,
    eps_vanishes,
    frozen_parameters,
    second_moment_freezes,
    stalled_statistics,
)
from autoprec.graph.site import Site

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_NUM_NAMES = 4

# What to change in the user's code, for the reasons that have a cure other than FP32.
CURES = {
    ReasonCode.CONSTANT_OVERFLOWS: "write torch.finfo(x.dtype).min, or -inf where no row is masked completely",
    ReasonCode.GUARD_VANISHES: "use an eps that the format holds, or add it outside of the low region",
    ReasonCode.BOUND_ROUNDS_TO_ONE: "clamp the logits instead, or use the loss that takes logits",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to act on, or to know.

    `error`: a `must` mark; `warning`: a fault that a setting repairs; `note`: no fault on the recorded batch, or only
    for a choice that is not the default. `site` is empty for findings about the whole run.
    """

    code: str
    severity: Severity
    site: str
    message: str
    fix: str


def findings_of(
    marks: Iterable[Mark],
    diagnoses: Sequence[Diagnosis],
    advice: Sequence[LossScaleAdvice],
    storage: Storage,
    *,
    replay_matches: bool,
) -> tuple[Finding, ...]:
    """Return all findings: errors, then warnings, then notes, each in order of execution."""
    found = [*_replay(matches=replay_matches), *_faults(diagnoses), *_sites(marks), *_loss_scale(advice)]
    for each in advice:
        found += _storage(storage, each.format)
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def _replay(*, matches: bool) -> Iterator[Finding]:
    if not matches:
        yield Finding(
            code="replay_differs",
            severity="warning",
            site="",
            message="a replay of the recorded step gives another loss, so what is seen on it may not hold",
            fix="look for state outside the model or random numbers that no torch seed governs",
        )


def _faults(diagnoses: Sequence[Diagnosis]) -> Iterator[Finding]:
    """Yield one error for each place where a fault begins, and one for each site whose kernel is wrong."""
    for diagnosis in diagnoses:
        for chain in diagnosis.chains:
            origin, others = chain[0], chain[1:]
            reason = diagnosis.causes[origin]
            cure = CURES.get(reason.code)
            yield Finding(
                code=reason.code.value,
                severity="error",
                site=str(origin),
                message=f"{diagnosis.format}: {reason.detail}",
                fix=f"{_kept(origin, others)}; or {cure}" if cure else _kept(origin, others),
            )
        for fault in diagnosis.kernel_faults:
            reason = kernel_reason(fault)
            yield Finding(
                code=reason.code.value,
                severity="error",
                site=str(fault.site),
                message=reason.detail,
                fix=_kept(fault.site, ()),
            )


def _kept(origin: Site, others: Sequence[Site]) -> str:
    keep = f'keep it in FP32: {{sites: "{origin}", format: fp32}}'
    if not others:
        return keep
    return f"{keep}, and with it {_some([str(site) for site in others])}, which read what it makes"


def _sites(marks: Iterable[Mark]) -> Iterator[Finding]:
    """Yield a note for each constant that a format loses without harm, and for each op that the catalog lacks."""
    for mark in marks:
        for reason in mark.reasons:
            if (reason.code in CURES and mark.verdict != "must") or reason.code is ReasonCode.UNKNOWN_OP:
                cure = CURES.get(reason.code)
                keep = _kept(mark.site, ())
                yield Finding(
                    code=reason.code.value,
                    severity="note",
                    site=str(mark.site),
                    message=reason.detail,
                    fix=f"{keep}; or {cure}" if cure else keep,
                )


def _loss_scale(advice: Sequence[LossScaleAdvice]) -> Iterator[Finding]:
    for each in advice:
        if each.needed:
            site, frac = each.lost[0] if each.lost else ("", 1.0)
            others = f"; so do {len(each.lost) - 1} others" if len(each.lost) > 1 else ""
            yield Finding(
                code="gradients_underflow",
                severity="warning",
                site=site,
                message=f"without a loss scale its gradient loses {frac:.0%} of its norm in {each.format}{others}",
                fix=f"loss_scale: {{kind: dynamic, initial: {each.initial:.0f}}}",
            )


def _storage(storage: Storage, format_name: str) -> Iterator[Finding]:
    frozen = frozen_parameters(storage, format_name)
    if frozen:
        yield _note(
            "weights_do_not_move",
            f"stored in {format_name}, {len(frozen)} of {len(storage.parameters)} parameters do not move in the first "
            f"step: {_some(frozen)}",
            "keep FP32 weights: parameters: {storage: fp32}",
        )
    stalled = stalled_statistics(storage, format_name)
    if stalled:
        yield _note(
            "statistics_stall",
            f"stored in {format_name}, {len(stalled)} running statistics stall, as their momentum is below half a "
            f"spacing: {_some(stalled)}",
            "keep these buffers in FP32",
        )
    if second_moment_freezes(storage, format_name):
        yield _note(
            "second_moment_freezes",
            f"stored in {format_name}, {storage.optimizer}'s second moment never decays: 1 - beta2 is "
            f"{1 - (storage.second_moment_decay or 0):.2g}, below every half spacing",
            "keep exp_avg_sq in FP32",
        )
    if eps_vanishes(storage, format_name):
        yield _note(
            "optimizer_eps_vanishes",
            f"stored in {format_name}, {storage.optimizer}'s eps of {storage.eps:g} is 0, and a weight "
            "without gradient becomes 0 / 0",
            "keep FP32 weights and optimizer state, or set eps to 1e-4",
        )


def _note(code: str, message: str, fix: str) -> Finding:
    return Finding(code=code, severity="note", site="", message=message, fix=fix)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NUM_NAMES
    return ", ".join(names[:_NUM_NAMES]) + (f" and {rest} more" if rest > 0 else "")
