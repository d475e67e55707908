"""What there is to decide in a step, and what any decision costs: sites, the casts between them, and which agree."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from autoprec.errors import MeasurementError, PolicyError
from autoprec.graph.costs import PRECISIONS, Assignment, CastCost, OpCost, Prediction
from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.reads import Read, choices_of, reads_of
from autoprec.graph.site import Site

FP32 = -1  # in place of the index of a site: FP32 in any case


@dataclass(frozen=True, kw_only=True, slots=True)
class Casts:
    """One tensor and what reads it, by the index of their sites; it is cast once each way, if at all.

    The tensor is low if all `producers` are, and FP32 if there are none.
    """

    producers: tuple[int, ...]
    readers: tuple[int, ...]
    down_s: float
    up_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProblem:
    """The sites of a step with their costs in each of `PRECISIONS`, the casts between them, and which sites agree.

    `units` are the sites that are low together, by index; `unit_of` is the unit of each site, and `touching` the casts
    that depend on each unit.
    """

    sites: tuple[Site, ...]
    costs: tuple[tuple[Prediction, ...], ...]
    casts: tuple[Casts, ...]
    units: tuple[tuple[int, ...], ...]
    unit_of: tuple[int, ...]
    touching: tuple[tuple[int, ...], ...]


def cut_problem(
    op_graph: OpGraph,
    costs: Mapping[str, OpCost],
    casts: Mapping[str, CastCost],
    ties: Iterable[Collection[Site]] = (),
) -> CutProblem:
    """Return what there is to decide in a step, given the costs of its nodes and of casting their results, by name.

    A tensor without a cast cost shares the cast of what it is a view of, and costs nothing if that has none either. The
    sites of each of `ties` are low together or FP32 together; FP8 remains a choice of each.

    Raises: `MeasurementError` for a call that has no costs, and for costs that no cut can take; `PolicyError` for a tie
    of a site that no policy casts.
    """
    choices = choices_of(op_graph)
    index = {site: place for place, site in enumerate(choices)}
    between = _casts(reads_of(op_graph), casts, index)
    groups = [_tied(tie, index) for tie in ties] + [each.producers for each in between]
    units = _units(len(index), groups)
    unit_of = {site: place for place, unit in enumerate(units) for site in unit}
    touching: list[list[int]] = [[] for _ in units]
    for place, each in enumerate(between):
        for unit in {unit_of[site] for site in (*each.producers, *each.readers) if site != FP32}:
            touching[unit].append(place)
    return CutProblem(
        sites=tuple(index),
        costs=tuple(_site_costs(site, nodes, costs) for site, nodes in choices.items()),
        casts=between,
        units=units,
        unit_of=tuple(unit_of[site] for site in range(len(index))),
        touching=tuple(map(tuple, touching)),
    )


def predicted(problem: CutProblem, assignment: Assignment) -> Prediction:
    """Return what an assignment costs; sites that it does not name are FP32, and it may part sites that are tied.

    Raises: `PolicyError` for a site that no policy casts, and for a precision that does not exist.
    """
    codes = bytearray(len(problem.sites))
    index = {site: place for place, site in enumerate(problem.sites)}
    for site, precision in assignment.items():
        if site not in index:
            raise PolicyError(f"cannot predict {precision} at {site}: {_NO_CHOICE}")
        if precision not in PRECISIONS:
            raise PolicyError(f'cannot predict "{precision}" at {site}; allowed: {", ".join(PRECISIONS)}')
        codes[index[site]] = PRECISIONS.index(precision)
    return spent(problem, codes, range(len(problem.sites)), range(len(problem.casts)))


def spent(problem: CutProblem, codes: Sequence[int], sites: Iterable[int], casts: Iterable[int]) -> Prediction:
    """Return what these sites and casts cost if each site has the precision that its code stands for."""
    time_s, error, num_bytes = 0.0, 0.0, 0
    for site in sites:
        cost = problem.costs[site][codes[site]]
        time_s += cost.time_s
        error += cost.error
        num_bytes += cost.bytes
    for place in casts:
        each = problem.casts[place]
        if each.producers and all(codes[site] for site in each.producers):
            time_s += each.up_s if any(site == FP32 or not codes[site] for site in each.readers) else 0.0
        elif any(site != FP32 and codes[site] for site in each.readers):
            time_s += each.down_s
    return Prediction(time_s=time_s, error=error, bytes=num_bytes)


_NO_CHOICE = "no policy casts such a site in this step; name a site whose calls it may cast"


def _tied(tie: Collection[Site], index: Mapping[Site, int]) -> tuple[int, ...]:
    for site in tie:
        if site not in index:
            raise PolicyError(f"cannot tie {site} to others: {_NO_CHOICE}")
    return tuple(index[site] for site in tie)


def _units(num_sites: int, groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    agreeing: nx.Graph[int] = nx.Graph()
    agreeing.add_nodes_from(range(num_sites))
    for group in groups:
        nx.add_path(agreeing, group)
    return tuple(tuple(sorted(unit)) for unit in nx.connected_components(agreeing))


def _casts(reads: Iterable[Read], costs: Mapping[str, CastCost], index: Mapping[Site, int]) -> tuple[Casts, ...]:
    """Return what is cast, with all readers that share a cast."""
    shared: defaultdict[tuple[str, tuple[Site, ...], str], list[Read]] = defaultdict(list)
    for number, read in enumerate(reads):
        # What leaves the model is the tensor that the model computed, whatever view of it the loss code reads.
        tensors = read.tensor[::-1] if read.leaves else read.tensor
        name = next((name for name in tensors if name in costs), None)
        if name is not None:
            own = "" if costs[name].shared else "leaves" if read.leaves else str(number)
            shared[name, read.producers, own].append(read)
    found = []
    for (name, _, _), together in shared.items():
        cost = costs[name]
        if not all(math.isfinite(each) and each >= 0 for each in (cost.down_s, cost.up_s)):
            raise MeasurementError(
                f"cannot plan: casting the result of {name} costs {cost.down_s} s down and {cost.up_s} s up; "
                "allowed: finite seconds of at least 0; measure it again, or leave it out"
            )
        readers = dict.fromkeys(FP32 if read.reader is None else index[read.reader] for read in together)
        producers = tuple(index[site] for site in together[0].producers)
        found.append(Casts(producers=producers, readers=tuple(readers), down_s=cost.down_s, up_s=cost.up_s))
    return tuple(found)


def _site_costs(site: Site, nodes: Iterable[OpNode], costs: Mapping[str, OpCost]) -> tuple[Prediction, ...]:
    """Return what all calls of a site cost together in each precision."""
    calls = []
    for node in nodes:
        if node.name not in costs:
            raise MeasurementError(
                f"cannot plan: the call {node.name} of {site} has no costs; give it an OpCost, with low_s=math.inf if "
                "it cannot run low"
            )
        calls.append(costs[node.name])
    found = (
        _sum((cost.fp32_s, 0.0, cost.fp32_bytes) for cost in calls),
        _sum((cost.low_s, cost.error, cost.low_bytes) for cost in calls),
        _sum((cost.fp8_s, cost.fp8_error, cost.low_bytes) for cost in calls),
    )
    if not math.isfinite(found[0].time_s) or any(not each.time_s > -math.inf or not each.error >= 0 for each in found):
        raise MeasurementError(
            f"cannot plan: {site} costs {', '.join(f'{each.time_s} s with error {each.error}' for each in found)} "
            f"({', '.join(PRECISIONS)}); allowed: a finite time in FP32, and errors of at least 0; measure it again"
        )
    return found


def _sum(terms: Iterable[tuple[float, float, int]]) -> Prediction:
    time_s, error, num_bytes = map(sum, zip(*terms, strict=True))
    return Prediction(time_s=time_s, error=error, bytes=num_bytes)
