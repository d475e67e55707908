"""Findings: what somebody should do something about, most harmful first."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoprec.analysis.loss_scale import LossScaleAdvice
from autoprec.analysis.loss_scale_findings import loss_scale_findings
from autoprec.analysis.marks import Mark, Reason, ReasonCode
from autoprec.analysis.storage import Storage
from autoprec.analysis.storage_findings import storage_findings

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

# What to change in the user's code, for the reasons that have a cure other than FP32.
_CURES = {
    ReasonCode.CONSTANT_OVERFLOWS: "write torch.finfo(x.dtype).min, or -inf where no row is masked completely",
    ReasonCode.GUARD_VANISHES: "use an eps that the format holds, or add it outside of the low region",
    ReasonCode.BOUND_ROUNDS_TO_ONE: "clamp the logits instead, or use the loss that takes logits",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to act on, or to know.

    `error`: a `must` mark; `warning`: a fault that a setting repairs; `note`: no fault on the recorded batch, or only
    for a choice that is not the default. `site` is empty for findings about the whole run; `names` are the parameters,
    buffers or gradients that one about storage is about.
    """

    code: str
    severity: Severity
    site: str
    message: str
    fix: str
    names: tuple[str, ...] = ()


def findings_of(
    marks: Iterable[Mark], advice: Sequence[LossScaleAdvice], storage: Storage, *, replay_matches: bool
) -> tuple[Finding, ...]:
    """Return all findings: errors, then warnings, then notes, each in order of execution."""
    found = [*_replay(matches=replay_matches), *_sites(marks), *_loss_scale(advice)]
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


def _sites(marks: Iterable[Mark]) -> Iterator[Finding]:
    for mark in marks:
        for reason in mark.reasons:
            severity = _severity(mark, reason)
            if severity is not None:
                cure = _CURES.get(reason.code)
                keep = f'keep it in FP32: {{sites: "{mark.site}", format: fp32}}'
                yield Finding(
                    code=reason.code.value,
                    severity=severity,
                    site=str(mark.site),
                    message=reason.detail,
                    fix=f"{keep}; or {cure}" if cure else keep,
                )


def _severity(mark: Mark, reason: Reason) -> Severity | None:
    """Return how harmful a reason is; None for what the classes of ops say by default."""
    is_fault = reason.code in _CURES and bool(reason.evidence["raises"] or reason.evidence["num_broken_calls"])
    if is_fault and mark.verdict == "must":
        return "error"
    return "note" if reason.code in _CURES or reason.code is ReasonCode.UNKNOWN_OP else None


def _loss_scale(advice: Sequence[LossScaleAdvice]) -> Iterator[Finding]:
    for each in (found for one in advice for found in loss_scale_findings(one)):
        yield Finding(code=each.code, severity=each.severity, site=each.site, message=each.message, fix=each.fix)


def _storage(storage: Storage, format_name: str) -> Iterator[Finding]:
    for each in storage_findings(storage, format_name):
        yield Finding(
            code=each.code, severity=each.severity, site="", message=each.message, fix=each.fix, names=each.names
        )
