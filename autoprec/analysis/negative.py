"""What needs no care, and where a format that is thought safe is the worse one."""

import math
from collections.abc import Iterable, Iterator, Sequence

from autoprec.analysis.findings import Finding
from autoprec.analysis.marks import Mark, Reason, ReasonCode
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS, format_named
from autoprec.ops import lookup

# Faults of a short significand, of which bf16 has the shortest; its range helps with none of them.
_OF_PRECISION = frozenset(
    {
        ReasonCode.POSITIONS_COLLIDE,
        ReasonCode.PHASE_LOST,
        ReasonCode.LARGE_ADDEND,
        ReasonCode.VARIANCE_OF_MOMENTS,
        ReasonCode.NEARLY_EQUAL,
        ReasonCode.LONG_RECURRENCE,
        ReasonCode.ROUNDS_TO_ONE,
        ReasonCode.RUNNING_SUM,
        ReasonCode.BOUND_ROUNDS_TO_ONE,
        ReasonCode.LOG_OF_UNIFORM,
        ReasonCode.EXP_OF_DIFFERENCE,
    }
)


def fused_norm_marks(op_graph: OpGraph, formats: Sequence[str], marks: Iterable[Mark] = ()) -> tuple[Mark, ...]:
    """Return a `free` mark for each fused norm and format that says why it needs nothing.

    Leaves out what `marks` tell of the backward of a norm's kernel.
    """
    harmed = {(m.site, m.format) for m in marks if any(r.code is ReasonCode.NORM_BACKWARD for r in m.reasons)}
    found: dict[tuple[Site, str], Mark] = {}
    for node in op_graph.calls():
        op = lookup(node.op)
        if op.family != "norm" or op.numerics != "infer" or node.site is None or not node.is_castable:
            continue
        for name in formats:
            key = (node.site, name)
            if key not in harmed and key not in found:
                found[key] = Mark(site=node.site, format=name, verdict="free", reasons=(_fused(node.op, name),))
    return tuple(found.values())


def _fused(op: str, format_name: str) -> Reason:
    limit = math.sqrt(format_named(format_name).max)
    return Reason(
        code=ReasonCode.FUSED_NORM,
        detail=f"{op} is one kernel, which squares and sums in FP32 inside; written out, its squares would overflow "
        f"{format_name} above {limit:.4g}",
        evidence={"number": limit},
    )


def coarser_findings(marks: Sequence[Mark]) -> Iterator[Finding]:
    """Yield a note for each kind of fault in which bf16 does worse than fp16; none unless both were judged."""
    if {"bf16", "fp16"} - {mark.format for mark in marks}:
        return
    bf16, fp16 = FORMATS["bf16"], FORMATS["fp16"]
    groups: dict[ReasonCode, dict[str, Reason]] = {}
    for mark in marks:
        for reason in mark.reasons:
            if mark.format == "bf16" and reason.code in _OF_PRECISION:
                groups.setdefault(reason.code, {}).setdefault(str(reason.evidence.get("at", mark.site)), reason)
    for code, reasons in groups.items():
        site, reason = next(iter(reasons.items()))
        others = f"; so at {len(reasons) - 1} other sites" if len(reasons) > 1 else ""
        yield Finding(
            code=f"bf16_coarser_{code.value}",
            severity="note",
            site=site,
            message=f"bf16 has {bf16.precision} significant bits where fp16 has {fp16.precision}, and no range helps "
            f"here: {reason.detail}{others}",
            fix="keep these sites in FP32, or take fp16 with a loss scale where its range suffices",
        )
