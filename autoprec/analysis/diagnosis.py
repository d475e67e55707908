"""What a format does to a workload: whether it breaks the step, where that begins, and what must stay FP32."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoprec.analysis.build_up import SiteError, build_up
from autoprec.analysis.causes import Seen, cause_of
from autoprec.analysis.deadline import NEVER, Deadline
from autoprec.analysis.downstream import first_not_finite
from autoprec.analysis.faults import FormatCheck, check_format
from autoprec.analysis.kernel_faults import KernelFault, kernel_faults
from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import Reference
from autoprec.analysis.marks import Mark, Reason, ReasonCode
from autoprec.analysis.repair import Repair, find_repair, units_of
from autoprec.analysis.site_numbers import site_numbers
from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.site import Site
from autoprec.numerics import format_named
from autoprec.ops import lookup

MOST_STEPS = 400
_OVERFLOWS = frozenset({ReasonCode.OVERFLOW, ReasonCode.OVERFLOW_INSIDE, ReasonCode.READS_OVERFLOW})


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What a format breaks, and the smallest repair.

    `repair` is None where nothing is broken. `causes` holds a reason for each of its sites. `chains` groups them: the
    first of each is where a fault begins, the others read what it makes and need FP32 for the same numbers. `errors`
    holds the error of each site's result with everything low, as it builds up along the step. `left_out` says what the
    deadline did.
    """

    format: str
    num_sites: int
    check: FormatCheck
    repair: Repair | None
    causes: Mapping[Site, Reason]
    chains: tuple[tuple[Site, ...], ...]
    kernel_faults: tuple[KernelFault, ...]
    errors: tuple[SiteError, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Site, ...]:
        """Return every site that must stay FP32, in order of execution within each kind."""
        repaired = self.repair.sites if self.repair else ()
        return tuple(dict.fromkeys([*repaired, *(fault.site for fault in self.kernel_faults)]))

    @property
    def overflow_origins(self) -> tuple[Site, ...]:
        """Return where the forward pass leaves the format's range, so that no loss scale helps."""
        if math.isfinite(self.check.damage.loss_error) or self.check.damage.raised:
            return ()
        return tuple(chain[0] for chain in self.chains if self.causes[chain[0]].code in _OVERFLOWS)


def diagnose(
    references: Sequence[Reference],
    fmt: LowFormat,
    *,
    loss_scale: float = 1.0,
    least_scale: float = 1.0,
    max_steps: int = MOST_STEPS,
    deadline: Deadline = NEVER,
) -> Diagnosis:
    """Return the diagnosis of a format on recorded steps, under a loss scale that may back off to `least_scale`.

    Costs one step a batch and some three more where the format does no harm; up to `max_steps` more where it does.
    Whether the format breaks the step is found out whatever the deadline is.
    """
    sites = _sites(references, fmt)
    check = check_format(references, fmt, sites, loss_scale, least_scale)
    repair: Repair | None = None
    causes: Mapping[Site, Reason] = {}
    chains: tuple[tuple[Site, ...], ...] = ()
    if check.is_broken:
        repair = find_repair(references, fmt, check, sites, max_steps, deadline)
        worst = references[check.batch]
        causes = _causes(worst, fmt, repair)
        chains = tuple(_chains(worst.recording.op_graph, repair.sites))
    healthy = [site for site in sites if repair is None or site not in set(repair.sites)]
    left_out = []
    if repair is not None and not repair.is_minimal and deadline.is_over:
        left_out.append(f"{fmt.name}: which of {len(repair.sites)} sites break the step; all of them stay in fp32")
    faults: tuple[KernelFault, ...] = ()
    if not deadline.is_over:
        faults = kernel_faults(references[check.batch], fmt, healthy, check.damage.loss_scale, deadline)
    if deadline.is_over:
        left_out.append(f"{fmt.name}: whether all kernels of this device are right")
    return Diagnosis(
        format=fmt.name, num_sites=len(sites), check=check, repair=repair, causes=causes, chains=chains,
        kernel_faults=faults, left_out=tuple(left_out),
        errors=() if deadline.is_over else build_up(references[check.batch], fmt, frozenset(sites)),
    )  # fmt: skip


def diagnosis_marks(diagnosis: Diagnosis) -> tuple[Mark, ...]:
    """Return a `must` for every site that has to stay FP32."""
    repaired = diagnosis.repair.sites if diagnosis.repair else ()
    found = [(site, diagnosis.causes[site]) for site in dict.fromkeys([*repaired, *diagnosis.causes])]
    found += [(fault.site, kernel_reason(fault)) for fault in diagnosis.kernel_faults]
    return tuple(Mark(site=site, format=diagnosis.format, verdict="must", reasons=(why,)) for site, why in found)


def kernel_reason(fault: KernelFault) -> Reason:
    """Return why a site whose kernel is wrong must stay FP32."""
    return Reason(
        code=ReasonCode.KERNEL_WRONG,
        detail=f"on this device its {fault.format} kernel gets the gradient of {fault.parameter} wrong by "
        f"{fault.error:.0%}, where rounding alone costs {fault.ideal_error:.1%}: it sums {fault.numel:,} values in "
        f"{fault.format}",
        evidence={
            "parameter": fault.parameter,
            "error": fault.error,
            "ideal_error": fault.ideal_error,
            "error_alone": fault.alone,
        },
    )


def _sites(references: Sequence[Reference], fmt: LowFormat) -> tuple[Site, ...]:
    """Return the sites that can run in the format, in order of first execution."""
    found: dict[Site, None] = {}
    for reference in references:
        for node in reference.recording.op_graph.calls():
            if node.site is not None and fmt.can_run(node):
                found[node.site] = None
    return tuple(found)


def _causes(reference: Reference, fmt: LowFormat, repair: Repair) -> dict[Site, Reason]:
    """Return the reason of each site of a repair, and of calls beyond it that no policy casts and that go wrong."""
    numbers = site_numbers(reference.recording, fmt, repair.sites)
    row = format_named(fmt.name)
    repeats = _repeats(reference.recording.op_graph, repair.sites)
    unseen = Reason(code=ReasonCode.MAGNIFIED, detail="the step is broken on another batch unless it stays FP32")
    found = {}
    for site in repair.sites:
        if site not in numbers:
            found[site] = unseen
            continue
        each = numbers[site]
        alone = repair.alone[site]
        is_sound = not (each.num_nonfinite or each.num_inputs_over or each.raised)
        beyond = first_not_finite(reference, fmt, site) if is_sound and math.isinf(alone) else None
        if beyond is not None and beyond.site is not None and not beyond.is_castable:
            found[beyond.site] = _as_given(beyond, site, fmt)
            found[site] = Reason(
                code=ReasonCode.READ_AS_GIVEN,
                detail=f"{beyond.site} computes in the format of its result, which no policy changes, and breaks",
                evidence={"reader": str(beyond.site)},
            )
        else:
            found[site] = cause_of(Seen(numbers=each, format=row, alone=alone, num_repeats=repeats.get(site, 1)))
    return found


def _as_given(node: OpNode, source: Site, fmt: LowFormat) -> Reason:
    why = "it runs under no_grad" if node.left_alone else "it writes to its argument"
    return Reason(
        code=ReasonCode.AS_GIVEN_BREAKS,
        detail=f"in {fmt.name} its result is not finite, and {why}, so it computes in the format of {source}: "
        "keep that one in FP32, or call .float() before it",
        evidence={"source": str(source)},
    )


def _repeats(graph: OpGraph, sites: Sequence[Site]) -> dict[Site, int]:
    """Return how often the line of each site runs in one call of its module, one after the other."""
    found: dict[Site, int] = {}
    for unit in units_of([graph], sites):
        for site in unit:
            found[site] = sum(other.module == site.module for other in unit)
    return found


def _chains(graph: OpGraph, sites: Sequence[Site]) -> Iterator[tuple[Site, ...]]:
    """Yield the sites in groups that hang together: each but the first reads what another one made."""
    group_of: dict[Site, list[Site]] = {}
    wanted = frozenset(sites)
    calls: dict[Site, list[OpNode]] = {site: [] for site in sites}
    for node in graph.calls():
        if node.site in wanted:
            assert node.site is not None
            calls[node.site].append(node)
    for site in sites:
        sources = {other for node in calls[site] for other in _sources(graph, node.name, wanted)} - {site}
        group = [site]
        for source in sources & group_of.keys():
            if group_of[source] is not group:
                group = _united(group_of[source], group, group_of)
        group_of[site] = group
    order = {site: index for index, site in enumerate(sites)}
    groups = {id(group): group for group in group_of.values()}
    for group in sorted(groups.values(), key=lambda members: min(order[member] for member in members)):
        yield tuple(sorted(group, key=order.__getitem__))


def _united(one: list[Site], other: list[Site], group_of: dict[Site, list[Site]]) -> list[Site]:
    one.extend(other)
    group_of.update(dict.fromkeys(other, one))
    return one


def _sources(graph: OpGraph, name: str, wanted: Collection[Site]) -> Iterator[Site]:
    """Yield the wanted sites whose results reach a node through ops that only pass numbers on."""
    waiting, seen = list(graph.digraph.predecessors(name)), set()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        node = graph[each]
        if node.site is not None and node.site in wanted:
            yield node.site
        elif node.kind == "op" and (node.site is None or lookup(node.op).numerics == "clear"):
            waiting.extend(graph.digraph.predecessors(each))
