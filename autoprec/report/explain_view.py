"""The view of one site: every number, label and order that `autoprec inspect --explain SITE` shows."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoprec.analysis.inspection import Inspection
from autoprec.analysis.measured import SiteTensor
from autoprec.graph.neighbors import Neighbor, named_neighbor, readers_of, reads_of
from autoprec.graph.opgraph import OpGraph, OpNode, TensorMeta
from autoprec.graph.site import Site
from autoprec.numerics import Format, format_named
from autoprec.ops import lookup
from autoprec.report.exponent_axis import Axis, axis_of, heights
from autoprec.report.inspect_view import marks_by_site, short_source

_NUM_NEIGHBORS = 8
_ROLE_NAMES = {"input": "input", "output": "output", "gradient": "gradient of output"}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictRow:
    """What is said of the site in one format, and every reason."""

    format: str
    verdict: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPicture:
    """The numbers of one tensor of the site.

    `heights` has one entry a column of the axis, in eighths of a text row, 0 where no element lies. `table` has a
    heading and a row for each format, and one for each that needs a loss scale, under that scale.
    """

    title: str
    comment: str
    facts: str
    heights: tuple[int, ...]
    table: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainView:
    """What an engineer needs to read of one site, in reading order. `axis` is that of every picture."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    verdicts: tuple[VerdictRow, ...]
    neighbors: tuple[tuple[str, str, str], ...]
    axis: Axis | None
    pictures: tuple[TensorPicture, ...]


def explain_view(
    inspection: Inspection, site: Site, *, workload: str, device: str, code: str, width: int
) -> ExplainView:
    """Return the view of `site`; `code` is its source line, and pictures have at most `width` columns."""
    graph, tensors = inspection.op_graph, inspection.numerics.sites.get(site, ())
    formats = [format_named(name) for name in inspection.formats]
    axis = axis_of([each.numerics.histogram for each in tensors], formats, width)
    scales = {each.format: each.initial for each in inspection.advice if each.needed}
    return ExplainView(
        headline=f"{site} in {workload} on {device}",
        facts=tuple(_facts(inspection, graph.calls_of(site), site, code)),
        verdicts=tuple(
            VerdictRow(format=mark.format, verdict=mark.verdict, reasons=tuple(each.detail for each in mark.reasons))
            for mark in marks_by_site(inspection.marks).get(site, ())
        ),
        neighbors=(
            *_neighbor_rows("reads", reads_of(graph, site)),
            *_neighbor_rows("read by", readers_of(graph, site)),
        ),
        axis=axis,
        pictures=tuple(_picture(each, tensors, graph, formats, axis, scales) for each in tensors),
    )


def _facts(inspection: Inspection, calls: Sequence[OpNode], site: Site, code: str) -> Iterable[tuple[str, str]]:
    op, first = lookup(site.op), calls[0]
    yield "source", "   ".join(part for part in (short_source(first.source), code) if part)
    yield "op", f"{op.name} ({op.family}); by its class alone: {_CLASSES[op.numerics]}"
    yield "tensors", f"{_metas(first.inputs)} -> {_metas(first.outputs)}"
    if first.constants:
        yield "constants", ", ".join(f"{each:g}" for each in dict.fromkeys(first.constants))
    if len(calls) > 1:
        yield "calls", f"{len(calls)} in a step, as its module is called more than once"
    for diagnosis in inspection.diagnoses:
        for each in diagnosis.errors:
            if each.site == site:
                grown = "" if each.first == each.last else f" in its first call, {each.last:.2g} in its last"
                yield f"error in {diagnosis.format}", f"{each.first:.2g} of its result with everything low{grown}"
    yield "measured", f"over {_counted(inspection.numerics.num_batches, 'training step')} in FP32"


_CLASSES = {
    "allow": "gains from a low format",
    "infer": "low if what it reads is",
    "deny": "FP32 by default",
    "clear": "takes the format of what it reads",
}


def _metas(metas: Sequence[TensorMeta]) -> str:
    return ", ".join(f"{meta.dtype} {'x'.join(map(str, meta.shape)) or 'scalar'}" for meta in metas) or "none"


def _neighbor_rows(label: str, neighbors: Sequence[Neighbor]) -> Iterable[tuple[str, str, str]]:
    """Yield label, name and source of each neighbor; the label stands with the first alone."""
    for index, each in enumerate(neighbors[:_NUM_NEIGHBORS]):
        yield label if index == 0 else "", _named(each), short_source(each.node.source)
    if len(neighbors) > _NUM_NEIGHBORS:
        yield "", f"and {len(neighbors) - _NUM_NEIGHBORS} more", ""
    if not neighbors:
        yield label, "nothing", ""


def _named(neighbor: Neighbor) -> str:
    return f"{neighbor} (by way of {', '.join(neighbor.via)})" if neighbor.via else str(neighbor)


def _picture(
    tensor: SiteTensor,
    tensors: Sequence[SiteTensor],
    graph: OpGraph,
    formats: Sequence[Format],
    axis: Axis | None,
    scales: dict[str, float],
) -> TensorPicture:
    found, is_alone = tensor.numerics, sum(each.role == tensor.role for each in tensors) == 1
    sources = dict.fromkeys(_named(named_neighbor(graph, name)) for name in tensor.sources)
    columns = heights(found.histogram, axis) if axis is not None else ()
    rows = [_format_row(tensor, low, 1.0) for low in formats]
    if tensor.role == "gradient":
        rows += [_format_row(tensor, low, scales[low.name]) for low in formats if low.name in scales]
    return TensorPicture(
        title=_ROLE_NAMES[tensor.role] + ("" if is_alone else f" {tensor.index}"),
        comment=", ".join(sources),
        facts=", ".join([*_tensor_facts(tensor), *_tallest(tensor, axis)]),
        heights=columns,
        table=(("", "headroom", "overflow", "become 0", "lose digits", "rounding error"), *rows),
    )


def _tensor_facts(tensor: SiteTensor) -> Iterable[str]:
    found = tensor.numerics
    yield _counted(found.num_elements, "element")
    if found.histogram.num_zero:
        yield f"{_percent(found.histogram.num_zero, found.num_elements)} exactly 0"
    if found.num_nan:
        yield f"{found.num_nan:,} NaN"
    if found.num_inf:
        yield f"{found.num_inf:,} infinite"
    if found.num_elements > found.histogram.num_nonfinite:
        yield f"from {found.minimum:.4g} to {found.maximum:.4g}"


def _tallest(tensor: SiteTensor, axis: Axis | None) -> Iterable[str]:
    """Yield what the tallest column of the picture stands for."""
    if axis is not None and tensor.numerics.histogram.counts:
        columns = axis.columns(tensor.numerics.histogram)
        top = max(range(len(columns)), key=lambda column: columns[column])
        low, high = axis.binades(top)
        yield f"tallest bar {_percent(columns[top], sum(columns))} in 2^{low} to 2^{high + 1}"


def _format_row(tensor: SiteTensor, low: Format, scale: float) -> tuple[str, ...]:
    """Return what `low` does to a tensor, times a loss scale, in the columns of the table."""
    histogram, rounding = tensor.numerics.histogram, tensor.numerics.rounding[low.name]
    num_nonzero = histogram.num_nonzero
    flush = histogram.flush_frac(low, scale)
    lost = histogram.subnormal_frac(low, scale) - flush
    is_scaled = scale != 1.0
    overflow = histogram.overflow_frac(low, scale) * num_nonzero if is_scaled else rounding.num_overflow
    headroom = histogram.headroom(low)
    return (
        f"{low.name} x 2^{math.log2(scale):.3g}" if is_scaled else low.name,
        "" if headroom is None else f"2^{headroom - math.log2(scale):.1f}",
        _percent(overflow, num_nonzero),
        _percent(flush * num_nonzero, num_nonzero),
        _percent(lost * num_nonzero, num_nonzero),
        "" if is_scaled else _percent(rounding.relative_error, 1),
    )


def _percent(count: float, total: float) -> str:
    """Return a fraction as a percentage; what is not 0 never reads as 0, nor what is not all as all."""
    if not count or not total:
        return "0"
    frac = count / total
    if frac < 1e-5:
        return "<0.001 %"
    text = f"{100 * frac:.3g} %" if frac >= 0.01 else f"{100 * frac:.2g} %"
    return ">99.9 %" if frac < 1 and text == "100 %" else text


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
