"""The table of patterns, and what it says of a graph."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from autoprec.analysis.marks import VERDICTS, Mark, Reason, ReasonCode
from autoprec.analysis.patterns import moments, positions, probabilities, totals
from autoprec.analysis.patterns.row import Match, Pattern
from autoprec.analysis.patterns.walk import Walk, lowered
from autoprec.analysis.ranges import Interval, ranges_of
from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.site import Site
from autoprec.numerics import Format, format_named

PATTERNS: tuple[Pattern, ...] = (*probabilities.PATTERNS, *moments.PATTERNS, *totals.PATTERNS, *positions.PATTERNS)


def cure_of(code: ReasonCode) -> str:
    """Return the rewrite that cures what a pattern of this code finds; nothing for other codes."""
    return next((pattern.cure for pattern in PATTERNS if pattern.code is code), "")


def pattern_marks(
    op_graph: OpGraph,
    formats: Sequence[str],
    ranges: Mapping[str, Interval] | None = None,
    *,
    device_kind: str = "cpu",
) -> tuple[Mark, ...]:
    """Return one mark for each site, format and pattern that the site takes part in, in order of execution.

    `prefer`, or `must` where no data can make it harmless. `ranges` are those of `ranges_of`, without any data if not
    given. A site that several calls of its module share has the strongest mark of each pattern. Takes linear time.
    """
    walk = Walk(op_graph, ranges_of(op_graph) if ranges is None else ranges, device_kind)
    by_op: dict[str, list[Pattern]] = {}
    for pattern in PATTERNS:
        for op in pattern.ops:
            by_op.setdefault(op, []).append(pattern)
    marks: dict[tuple[Site, str, ReasonCode], Mark] = {}
    lows = [format_named(name) for name in formats]
    for node in op_graph.calls():
        if node.args and any(meta.is_floating for meta in node.outputs):
            for pattern in by_op.get(node.op, ()):
                for low in lows:
                    for mark in _marks(walk, node, pattern, low):
                        _keep_strongest(marks, mark)
    return tuple(marks.values())


def explanations(marks: Sequence[Mark]) -> Mapping[tuple[Site, str], tuple[Reason, ...]]:
    """Return the reasons that `pattern_marks` found for each site and format, in the order of the table."""
    found: dict[tuple[Site, str], list[Reason]] = {}
    for mark in marks:
        found.setdefault((mark.site, mark.format), []).extend(mark.reasons)
    return MappingProxyType({key: tuple(sorted(reasons, key=_rank)) for key, reasons in found.items()})


def _rank(reason: Reason) -> int:
    return next(rank for rank, pattern in enumerate(PATTERNS) if pattern.code is reason.code)


def _marks(walk: Walk, node: OpNode, pattern: Pattern, low: Format) -> Iterator[Mark]:
    match = pattern.match(walk, node, low)
    if match is None:
        return
    reason = Reason(code=pattern.code, detail=match.detail, evidence=_evidence(match, node, pattern))
    for each in lowered(match.nodes):
        assert each.site is not None  # lowered yields sites only
        yield Mark(site=each.site, format=low.name, verdict=match.verdict, reasons=(reason,))


def _evidence(match: Match, node: OpNode, pattern: Pattern) -> Mapping[str, object]:
    return MappingProxyType(
        {
            "number": match.number,
            "at": str(node.site),
            "proved": match.verdict == "must",
            "cure": pattern.cure,
            **match.evidence,
        }
    )


def _keep_strongest(marks: dict[tuple[Site, str, ReasonCode], Mark], mark: Mark) -> None:
    key = (mark.site, mark.format, mark.reasons[0].code)
    known = marks.get(key)
    if known is None or VERDICTS.index(mark.verdict) > VERDICTS.index(known.verdict):
        marks[key] = mark
