"""The view of an inspection: every number, label and order that `autoprec inspect` shows."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoprec.analysis.diagnosis import Diagnosis
from autoprec.analysis.findings import Finding
from autoprec.analysis.inspection import Inspection
from autoprec.analysis.marks import VERDICTS, Mark, ReasonCode
from autoprec.analysis.storage_findings import STORAGE_CODES
from autoprec.graph.layers import layers_of
from autoprec.graph.opgraph import OpNode
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.report.storage_view import scale_sentence, storage_rows, storage_verdicts

_REPLAYS = {None: "not run", True: "equals the recorded loss", False: "DIFFERS from the recorded loss"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOps:
    """Ops of one layer pattern that share a reason not to be free: which, in which formats, why, and where."""

    ops: str
    verdict: str
    formats: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One line: the layers that share a pattern. `num_layers` modules call `num_sites` sites in all."""

    name: str
    num_layers: int
    num_sites: int
    kept: tuple[KeptOps, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingRow:
    """Equal findings about layers of one pattern, or in several formats, told once."""

    severity: str
    where: str
    message: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectView:
    """What an engineer needs to read of an inspection, in reading order."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    verdicts: tuple[tuple[str, ...], ...]
    findings: tuple[FindingRow, ...]
    layers: tuple[LayerRow, ...]
    storage: tuple[tuple[str, ...], ...]
    storage_verdicts: tuple[tuple[str, ...], ...]
    storage_notes: tuple[str, ...]


def inspect_view(inspection: Inspection, *, workload: str, device: str, every_site: bool = False) -> InspectView:
    """Return the view; with `every_site` each site has its own line, else the layers of one pattern share one."""
    graph = inspection.op_graph
    needs = [f"{each.format} {_need(each)}" for each in inspection.diagnoses]
    return InspectView(
        headline=f"{workload} on {device}: {len(graph.sites())} sites" + "".join(f"; {need}" for need in needs),
        facts=(
            ("graph", f"{len(graph):,} nodes, {len(graph.sites()):,} sites in {len(layers_of(graph)):,} layers"),
            ("replay", _REPLAYS[inspection.replay_matches]),
            *((each.format, _diagnosis_sentence(each)) for each in inspection.diagnoses),
            *((f"loss scale {each.format}", scale_sentence(each)) for each in inspection.advice),
        ),
        verdicts=tuple(_verdict_counts(inspection)),
        findings=tuple(_finding_rows(inspection, [each for each in inspection.findings if not _is_aside(each)])),
        layers=tuple(_site_rows(inspection) if every_site else _layer_rows(inspection)),
        storage=tuple(storage_rows(inspection.storage, inspection.formats)),
        storage_verdicts=tuple(storage_verdicts(inspection.storage, inspection.formats)),
        storage_notes=tuple(f"{each.message}; {each.fix}" for each in inspection.findings if _is_aside(each)),
    )


def marks_by_site(marks: Iterable[Mark]) -> dict[Site, list[Mark]]:
    """Return the marks of each site, one a format."""
    by_site: dict[Site, list[Mark]] = {}
    for mark in marks:
        by_site.setdefault(mark.site, []).append(mark)
    return by_site


def _need(diagnosis: Diagnosis) -> str:
    kept = len(diagnosis.kept)
    return f"needs {kept} of them in FP32" if kept else "breaks none"


def _diagnosis_sentence(diagnosis: Diagnosis) -> str:
    """Return whether a format breaks the step, and what mends it."""
    check, repair = diagnosis.check, diagnosis.repair
    kept, total = len(diagnosis.kept), diagnosis.num_sites
    error = check.damage.gradient_error
    found = f"{_off(error)} with everything low (allowed {check.limit:.2g})"
    if repair is None and not kept:
        return f"does no harm: {found}"
    if repair is None:
        return f"keep {kept} of {total:,} sites in FP32, whose kernels are wrong here; {found}"
    ending = "" if repair.is_minimal else "; the search for fewer ended early"
    return f"keep {kept} of {total:,} sites in FP32: {found}, {_off(repair.error)} with these in FP32{ending}"


def _off(error: float) -> str:
    return f"gradient off by {error:.2g}" if math.isfinite(error) else "loss or gradient not finite"


def _verdict_counts(inspection: Inspection) -> Iterator[tuple[str, ...]]:
    """Yield a heading, and a line for each format: how many sites have which verdict, the strongest first."""
    order = tuple(reversed(VERDICTS))
    yield ("", *order)
    for name in inspection.formats:
        counts = Counter(mark.verdict for mark in inspection.marks if mark.format == name)
        yield (name, *(f"{counts[verdict]:,}" for verdict in order))


def _is_aside(finding: Finding) -> bool:
    """Return whether a finding is about storage in another format than FP32: told where storage is shown."""
    return finding.code in STORAGE_CODES or (finding.severity == "note" and not finding.site)


def _finding_rows(inspection: Inspection, findings: Iterable[Finding]) -> Iterator[FindingRow]:
    """Yield one row for the findings of the same kind about the same site of layers that share a pattern."""
    patterns = _patterns(inspection)
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        where = _starred(finding.site, patterns) if finding.site else "whole run"
        groups.setdefault((finding.code, finding.severity, where), []).append(finding)
    for (_, severity, pattern), group in groups.items():
        first = group[0]
        num_sites = len({finding.site for finding in group})
        where = pattern if num_sites > 1 or not first.site else first.site
        yield FindingRow(
            severity=severity,
            where=f"{where} ({num_sites} sites)" if num_sites > 1 else where,
            message="\n".join(dict.fromkeys(finding.message for finding in group if finding.site == first.site)),
            fix=first.fix.replace(first.site, where) if first.site else first.fix,
        )


def _patterns(inspection: Inspection) -> dict[str, str]:
    return {layer.name: layer.pattern for layer in layers_of(inspection.op_graph)}


def _starred(site: str, patterns: Mapping[str, str]) -> str:
    parsed = Site.parse(site)
    return f"{patterns.get(parsed.module, parsed.module)}:{parsed.op}#{parsed.index}"


def _layer_rows(inspection: Inspection) -> Iterator[LayerRow]:
    marks, calls = marks_by_site(inspection.marks), _first_calls(inspection)
    groups: dict[str, list[tuple[Site, ...]]] = {}
    for layer in layers_of(inspection.op_graph):
        groups.setdefault(layer.pattern, []).append(layer.sites)
    for pattern, layers in groups.items():
        sites = [site for each in layers for site in each]
        kept = tuple(_kept_ops(sites, marks, calls))
        yield LayerRow(name=_shown(pattern), num_layers=len(layers), num_sites=len(sites), kept=kept)


def _site_rows(inspection: Inspection) -> Iterator[LayerRow]:
    marks, calls = marks_by_site(inspection.marks), _first_calls(inspection)
    for site in inspection.op_graph.sites():
        yield LayerRow(name=str(site), num_layers=1, num_sites=1, kept=tuple(_kept_ops([site], marks, calls)))


def _kept_ops(
    sites: Sequence[Site], marks: Mapping[Site, Sequence[Mark]], calls: Mapping[Site, OpNode]
) -> Iterator[KeptOps]:
    """Yield one entry for each reason that keeps ops among `sites`, with those ops once each, as first met."""
    groups: dict[tuple[str, str, str], list[tuple[Mark, Site]]] = {}
    seen: set[tuple[str, int]] = set()
    for site in sites:
        kept = [mark for mark in marks[site] if mark.verdict != "free"]
        if kept and (site.op, site.index) not in seen:
            seen.add((site.op, site.index))
            first = max(kept, key=lambda mark: VERDICTS.index(mark.verdict))
            same = [mark for mark in kept if mark.verdict == first.verdict]
            formats = "" if len(same) == len(marks[site]) else _listed([mark.format for mark in same])
            groups.setdefault((first.verdict, formats, _why(first)), []).append((first, site))
    for (verdict, formats, why), members in groups.items():
        yield KeptOps(
            ops=", ".join(f"{site.op}#{site.index}" for _, site in members),
            verdict=verdict,
            formats=formats,
            why=why,
            source=short_source(calls[members[0][1]].source),
        )


def _why(mark: Mark) -> str:
    """Return the gist of a mark's first reason. A spread is told by its origin alone, so that its ops share a line."""
    reason = mark.reasons[0]
    if reason.code is not ReasonCode.CONTAMINATED:
        return reason.detail.partition("; ")[0]
    origin = str(reason.evidence["origin"])
    module, colon, op = origin.rpartition(":")
    return f"after {op if module == mark.site.module and colon else origin}, FP32 by default"


def _first_calls(inspection: Inspection) -> dict[Site, OpNode]:
    """Return the first call of each site."""
    first: dict[Site, OpNode] = {}
    for node in inspection.op_graph.calls():
        if node.site is not None:
            first.setdefault(node.site, node)
    return first


def short_source(source: str) -> str:
    """Return `file:line` without the folders of the file."""
    return source.replace("\\", "/").rpartition("/")[2]


def _shown(pattern: str) -> str:
    return {"": "(root)", LOSS_MODULE: "(loss code)"}.get(pattern, pattern)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
