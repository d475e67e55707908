"""Everything that can be said of a recorded step without running it in a low format."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import constant_marks, lost_constants
from autoprec.analysis.findings import CURES, SEVERITIES, Finding, Severity
from autoprec.analysis.marks import Mark, Reason, ReasonCode, merge
from autoprec.analysis.negative import coarser_findings, fused_norm_marks
from autoprec.analysis.patterns import PATTERNS, pattern_marks
from autoprec.analysis.ranges import Known, ranges_of
from autoprec.analysis.ranges.propagate import NOTHING_KNOWN
from autoprec.graph.opgraph import OpGraph

_PATTERN_CODES = frozenset(pattern.code for pattern in PATTERNS)
_BY_DEFAULT = frozenset({ReasonCode.DENY_OP, ReasonCode.CONTAMINATED})


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticAnalysis:
    """Marks for each site and format in order of execution, and the findings they amount to."""

    marks: tuple[Mark, ...]
    findings: tuple[Finding, ...]


def static_analysis(
    op_graph: OpGraph, formats: Sequence[str], device_kind: str, known: Known = NOTHING_KNOWN
) -> StaticAnalysis:
    """Return what classes, constants, ranges and patterns say of a graph; `known` as `ranges_of` takes it.

    Nothing is run. Takes time linear in nodes and edges.
    """
    ranges = ranges_of(op_graph, known)
    patterns = pattern_marks(op_graph, formats, ranges, device_kind=device_kind)
    classes = static_marks(op_graph, formats, device_kind)
    constants = constant_marks(lost_constants(op_graph, formats))
    marks = merge((*classes, *constants, *patterns, *fused_norm_marks(op_graph, formats, patterns)))
    marks = tuple(_specific_first(mark) for mark in marks)
    return StaticAnalysis(marks=marks, findings=tuple(static_findings(marks)))


def _specific_first(mark: Mark) -> Mark:
    """Return `mark` with what is known of its op by default after what was found out about it."""
    reasons = tuple(sorted(mark.reasons, key=lambda reason: reason.code in _BY_DEFAULT))
    return Mark(site=mark.site, format=mark.format, verdict=mark.verdict, reasons=reasons)


def static_findings(marks: Sequence[Mark]) -> list[Finding]:
    """Return the findings of marks that nothing was run for: errors first, then notes, each in order of execution.

    A pattern is told once a format, at the call that completes it.
    """
    found = [*_of_sites(marks), *coarser_findings(marks)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _of_sites(marks: Iterable[Mark]) -> Iterator[Finding]:
    seen: set[tuple[ReasonCode, str, str]] = set()
    for mark in marks:
        for reason in mark.reasons:
            severity = _severity(mark, reason)
            site = str(reason.evidence.get("at", mark.site))
            key = (reason.code, mark.format, site)
            if severity is None or key in seen:
                continue
            seen.add(key)
            yield Finding(
                code=reason.code.value, severity=severity, site=site, message=reason.detail, fix=_fix(reason, site)
            )


def _severity(mark: Mark, reason: Reason) -> Severity | None:
    if reason.code in _PATTERN_CODES:
        return "error" if mark.verdict == "must" and reason.evidence["proved"] else "note"
    if reason.code in CURES:
        return "error" if reason.evidence["raises"] else "note"
    return "note" if reason.code is ReasonCode.UNKNOWN_OP else None


def _fix(reason: Reason, site: str) -> str:
    keep = f'keep it in FP32: {{sites: "{site}", format: fp32}}'
    cure = CURES.get(reason.code) or reason.evidence.get("cure")
    return f"{keep}; or {cure}" if cure else keep
