"""Findings: what somebody should do something about, most harmful first."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from autoprec.analysis.build_up import DOUBTFUL
from autoprec.analysis.diagnosis import Diagnosis, kernel_reason
from autoprec.analysis.loss_scale import LossScaleAdvice
from autoprec.analysis.loss_scale_findings import loss_scale_findings
from autoprec.analysis.marks import Mark, Reason, ReasonCode
from autoprec.analysis.storage import Storage
from autoprec.analysis.storage_findings import storage_findings
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS, format_named

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_NUM_NAMES, _NUM_CURES = 4, 2
_NOTHING: Mapping[tuple[Site, str], tuple[Reason, ...]] = MappingProxyType({})

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
    marks: Iterable[Mark],
    diagnoses: Sequence[Diagnosis],
    advice: Sequence[LossScaleAdvice],
    storage: Storage,
    *,
    replay_matches: bool,
    explained: Mapping[tuple[Site, str], tuple[Reason, ...]] = _NOTHING,
    fp32_error: float = 0.0,
    trained_low: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """Return all findings: errors, then warnings, then notes, each in order of execution.

    `explained` are the patterns that the graph shows at a site, each with its cure; `fp32_error` is the error of FP32's
    own gradient.
    """
    marks = tuple(marks)
    faults = tuple(_faults(diagnoses, explained, {(mark.site, mark.format): mark for mark in marks}))
    found = [*_replay(matches=replay_matches), *_fp32(fp32_error), *faults]
    found += [
        *_trained_low(trained_low),
        *_coarser(diagnoses),
        *_sites(marks),
        *_loss_scale(advice, {each.site for each in faults}),
    ]
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


def _fp32(error: float) -> Iterator[Finding]:
    if error > DOUBTFUL:
        yield Finding(
            code="fp32_in_doubt",
            severity="warning",
            site="",
            message=f"FP32's own gradient is off by {error:.2g} of its norm against FP64's: what low formats do is "
            "held against a yardstick that is uncertain itself",
            fix="look for a cancellation, a division by almost 0 or a long sum, and compute that part in torch.float64",
        )


def _trained_low(names: Sequence[str]) -> Iterator[Finding]:
    """Yield a note where the model is a low one already: it is no fault, and no reason to make it FP32."""
    if names:
        yield Finding(
            code="trained_low",
            severity="note",
            site="",
            message=f"{len(names)} parameters are stored in a low format by the model itself: {_some(names)}; what is "
            "called FP32 here computes on them as they are",
            fix="a model that was trained low may be right to stay there: change only what an error names",
            names=tuple(names),
        )


def _faults(
    diagnoses: Sequence[Diagnosis],
    explained: Mapping[tuple[Site, str], tuple[Reason, ...]],
    marked: Mapping[tuple[Site, str], Mark],
) -> Iterator[Finding]:
    """Yield one error for each place where a fault begins, and one for each site whose kernel is wrong."""
    for diagnosis in diagnoses:
        for chain in diagnosis.chains:
            origin, others = chain[0], chain[1:]
            reason = diagnosis.causes[origin]
            places = [(site, diagnosis.format) for site in chain]
            rewrites = [cure for place in places for cure in _cures_of_constants(marked.get(place))]
            rewrites += [str(each.evidence["cure"]) for place in places for each in explained.get(place, ())]
            cures = list(dict.fromkeys(rewrites))[:_NUM_CURES]
            yield Finding(
                code=reason.code.value,
                severity="error",
                site=str(origin),
                message=f"{diagnosis.format}: {reason.detail}",
                fix="; or ".join([_kept(origin, others), *cures]),
                names=tuple(str(site) for site in others),
            )
        for fault in diagnosis.kernel_faults:
            reason = kernel_reason(fault)
            yield Finding(
                code=reason.code.value,
                severity="error",
                site=str(fault.site),
                message=reason.detail,
                fix=_kept(fault.site, ()),
                names=(fault.parameter,),
            )


def _cures_of_constants(mark: Mark | None) -> Iterator[str]:
    """Yield what to write instead of the constants that the format loses; FP32's own limit may stand for finfo's."""
    for reason in mark.reasons if mark else ():
        if reason.code in CURES and abs(reason.evidence["constant"]) != FORMATS["fp32"].max:
            yield CURES[reason.code]


def _coarser(diagnoses: Sequence[Diagnosis]) -> Iterator[Finding]:
    """Yield a note where bf16, which is often taken for the safe choice, breaks what fp16 does not."""
    found = {each.format: each for each in diagnoses}
    if "bf16" not in found or "fp16" not in found:
        return
    repairs = {name: set(each.repair.sites if each.repair else ()) for name, each in found.items()}
    only = [site for site in found["bf16"].kept if site in repairs["bf16"] - repairs["fp16"]]
    if only:
        yield Finding(
            code="bf16_coarser",
            severity="note",
            site=str(only[0]),
            message=f"bf16 is no cure-all here: it breaks {len(only)} sites that fp16 does not, since it keeps "
            f"{format_named('bf16').precision} significant bits where fp16 keeps {format_named('fp16').precision}",
            fix="fp16 with a loss scale may do better at these sites, or keep them in FP32",
            names=tuple(str(site) for site in only),
        )


def _kept(origin: Site, others: Sequence[Site]) -> str:
    keep = f'keep it in FP32: {{sites: "{origin}", format: fp32}}'
    if not others:
        return keep
    return f"{keep}, and with it {_some([str(site) for site in others])}, which read what it makes"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NUM_NAMES
    return ", ".join(names[:_NUM_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _sites(marks: Iterable[Mark]) -> Iterator[Finding]:
    """Yield a note for each constant that a format loses without harm, and for each op that the catalog lacks."""
    for mark in marks:
        for reason in mark.reasons:
            if (reason.code in CURES and mark.verdict != "must") or reason.code is ReasonCode.UNKNOWN_OP:
                cure = CURES.get(reason.code)
                keep = _kept(mark.site, ())
                harmless = "; no harm on the recorded batches" if cure else ""
                yield Finding(
                    code=reason.code.value,
                    severity="note",
                    site=str(mark.site),
                    message=reason.detail + harmless,
                    fix=f"{keep}; or {cure}" if cure else keep,
                )


def _loss_scale(advice: Sequence[LossScaleAdvice], broken: Collection[str]) -> Iterator[Finding]:
    """Yield what gradients need; that a site overflows before them is no second finding where it is an error."""
    for each in (found for one in advice for found in loss_scale_findings(one)):
        if each.code == "forward_overflow" and each.site in broken:
            continue
        yield Finding(code=each.code, severity=each.severity, site=each.site, message=each.message, fix=each.fix)


def _storage(storage: Storage, format_name: str) -> Iterator[Finding]:
    for each in storage_findings(storage, format_name):
        yield Finding(
            code=each.code, severity=each.severity, site="", message=each.message, fix=each.fix, names=each.names
        )
