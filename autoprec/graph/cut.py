"""The exact plan for a price of error: which sites run low, by one minimum cut.

Minimized is time + price of error x error + price of bytes x bytes over all assignments of FP32 or low to the sites of
a step. The sites that must agree are one unit, one node of the network. The source side is FP32, the sink side low, and
an arc is paid if its tail is FP32 and its head is low:

- source -> unit, or unit -> sink, carries by how much low, or FP32, is dearer. A unit with a site that cannot run low,
  or whose error is infinite, is the source itself.
- A tensor of unit p that others read is cast down if p is FP32 and any of them is low. An auxiliary node d makes that
  one payment: p -> d carries the cast, and d -> reader is infinite, so that d is low as soon as one reader is. In the
  same way reader -> u is infinite and u -> p carries the cast up, paid if p is low and any reader is FP32. With one
  reader the arc is direct. The source stands for tensors and readers that are FP32 in any case.

Views and all else without a choice are contracted: what is left of them is which sites decide the format of a tensor
that is read (`autoprec.graph.reads`). Where one call that is left alone reads several results, it returns the widest,
and "low only if all of them are" is no cut: their sites must agree, unless another of them is FP32 anyway or casting
what the call returns is free.

FP8 is an attribute of being low: at a price each site has one cheapest way of being low, and that is its cost there.

Capacities are integers: floats times the power of two that brings their sum to about 2^60. Rounding them changes
nothing but what is below 2^-60 of the sum, far less than the rounding of the floats themselves; the flow is exact.

Source: Greig, Porteous and Seheult 1989, Exact maximum a posteriori estimation for binary images, section 2 (two labels
as a cut); Picard and Ratliff 1975, Minimum cuts and related problems (cuts and quadratic functions of binary
variables); Rhys 1970, A selection problem of shared fixed costs and network flows (a cost paid once as its own node).
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx
from networkx.algorithms.flow import preflow_push

from autoprec.errors import MeasurementError
from autoprec.graph.costs import (
    PRECISIONS,
    Assignment,
    CastCost,
    OpCost,
    Planned,
    Precision,
    Prediction,
    dominates,
    undominated,
)
from autoprec.graph.cut_problem import FP32, Casts, CutProblem, cut_problem, predicted, spent
from autoprec.graph.settle import settled

__all__ = [
    "Assignment",
    "CastCost",
    "CutProblem",
    "OpCost",
    "Planned",
    "Precision",
    "Prediction",
    "Prices",
    "cheapest",
    "cut_problem",
    "dominates",
    "lowered",
    "planned",
    "predicted",
    "undominated",
]

# Units are numbered from 0, auxiliary nodes from -3 down.
_Arc: TypeAlias = tuple[int, int, float]
_SOURCE, _SINK = -1, -2
_BITS = 60
_FP32_CODE, *_LOW_CODES = range(len(PRECISIONS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Seconds per unit of error, and per byte saved for backward. An infinite price of error allows no error at all.

    Raises: `MeasurementError` for a negative price or none, and for an infinite price of bytes.
    """

    error: float
    byte: float = 0.0

    def __post_init__(self) -> None:
        if not self.error >= 0 or not 0 <= self.byte < math.inf:
            raise MeasurementError(
                f"cannot plan at {self.error} s per unit of error and {self.byte} s per byte; allowed: at least 0, and "
                "for bytes a finite price"
            )

    def value(self, spent: Prediction) -> float:
        """Return the seconds that time, error and bytes are worth."""
        if spent.error == math.inf or (self.error == math.inf and spent.error > 0):
            return math.inf
        return self.cost(spent) + (self.error * spent.error if self.error < math.inf else 0.0)

    def cost(self, spent: Prediction) -> float:
        """Return the seconds that time and bytes are worth."""
        return spent.time_s + self.byte * spent.bytes


def cheapest(problem: CutProblem, *, error_price: float, byte_price: float = 0.0) -> Planned:
    """Return the assignment that minimizes time + `error_price` x error + `byte_price` x bytes.

    Of equally good ones it is the one with the fewest low sites. At an infinite price of error no site runs low that
    has any, and the rest minimizes time.

    Raises: `MeasurementError` for a price that is none.
    """
    prices = Prices(error=error_price, byte=byte_price)
    codes = lowered(problem, prices, bytes(len(problem.sites)), range(len(problem.units)))
    return planned(problem, codes, error_price)


def planned(problem: CutProblem, codes: Sequence[int], error_price: float) -> Planned:
    """Return the plan in which each site has the precision that its code stands for."""
    return Planned(
        assignment={site: PRECISIONS[code] for site, code in zip(problem.sites, codes, strict=True)},
        predicted=spent(problem, codes, range(len(problem.sites)), range(len(problem.casts))),
        error_price=error_price,
    )


def lowered(problem: CutProblem, prices: Prices, codes: bytes, free: Collection[int]) -> bytes:
    """Return the codes that are best at these prices if only the units in `free` may change."""
    ways = {site: _way_low(problem.costs[site], prices) for unit in free for site in problem.units[unit]}
    dearer = {unit: sum(ways[site][0] for site in problem.units[unit]) for unit in free}

    certain = settled(problem, codes, dearer)

    def node(site: int) -> int:
        unit = FP32 if site == FP32 else problem.unit_of[site]
        if unit in dearer and unit not in certain:
            return unit
        return _SINK if unit != FP32 and certain.get(unit, codes[site] > 0) else _SOURCE

    open_units = [unit for unit in free if unit not in certain]
    arcs = [(_SOURCE, unit, dearer[unit]) if dearer[unit] > 0 else (unit, _SINK, -dearer[unit]) for unit in open_units]
    between = dict.fromkeys(place for unit in open_units for place in problem.touching[unit])
    for auxiliary, place in enumerate(between):
        each = problem.casts[place]
        tensor = node(each.producers[0]) if each.producers else _SOURCE
        arcs.extend(_cast_arcs(tensor, {node(site) for site in each.readers}, each, _SINK - 1 - 2 * auxiliary))
    low = {unit for unit, is_low in certain.items() if is_low}.union(*map(_sink_side, _apart(arcs)))
    changed = bytearray(codes)
    for unit in free:
        for site in problem.units[unit]:
            changed[site] = ways[site][1] if unit in low else _FP32_CODE
    return bytes(changed)


def _way_low(costs: Sequence[Prediction], prices: Prices) -> tuple[float, int]:
    """Return by how much the best way of being low is dearer than FP32, and its code; of equals that of less error."""
    value, _, code = min((prices.value(costs[code]), costs[code].error, code) for code in _LOW_CODES)
    return value - prices.value(costs[_FP32_CODE]), code


def _cast_arcs(tensor: int, readers: set[int], casts: Casts, auxiliary: int) -> Iterator[_Arc]:
    """Yield the arcs of the casts of one tensor; those that never carry anything are left out."""
    if tensor != _SINK:
        low = {_SINK} if _SINK in readers else readers - {tensor, _SOURCE}
        yield from _paid_once(tensor, low, casts.down_s, auxiliary)
    if tensor != _SOURCE:
        fp32 = {_SOURCE} if _SOURCE in readers else readers - {tensor, _SINK}
        yield from ((head, tail, cost) for tail, head, cost in _paid_once(tensor, fp32, casts.up_s, auxiliary - 1))


def _paid_once(tensor: int, readers: set[int], cost: float, auxiliary: int) -> Iterator[_Arc]:
    """Yield arcs from a tensor to its readers that carry `cost`, however many of the readers are on the other side."""
    if len(readers) == 1:
        yield tensor, next(iter(readers)), cost
    elif readers:
        yield tensor, auxiliary, cost
        yield from ((auxiliary, reader, math.inf) for reader in readers)


def _apart(arcs: Iterable[_Arc]) -> Iterator[list[_Arc]]:
    """Yield the arcs of each network that hangs together by more than source and sink; empty arcs are left out."""
    carrying = [arc for arc in arcs if arc[2] > 0 and arc[:2] != (_SOURCE, _SINK)]
    inner: nx.Graph[int] = nx.Graph()
    inner.add_nodes_from(head if tail == _SOURCE else tail for tail, head, _ in carrying)
    inner.add_edges_from(arc[:2] for arc in carrying if arc[0] != _SOURCE and arc[1] != _SINK)
    part_of = {node: number for number, nodes in enumerate(nx.connected_components(inner)) for node in nodes}
    parts: defaultdict[int, list[_Arc]] = defaultdict(list)
    for arc in carrying:
        parts[part_of[arc[1] if arc[0] == _SOURCE else arc[0]]].append(arc)
    yield from parts.values()


def _sink_side(arcs: Iterable[_Arc]) -> set[int]:
    """Return the smallest sink side of a minimum cut of the network with these arcs."""
    capacities: defaultdict[tuple[int, int], float] = defaultdict(float)
    for tail, head, capacity in arcs:
        capacities[tail, head] += capacity
    bits = _BITS - math.frexp(sum(each for each in capacities.values() if each < math.inf))[1]
    network: nx.DiGraph[int] = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for (tail, head), capacity in capacities.items():
        if capacity == math.inf:
            network.add_edge(tail, head)
        else:
            network.add_edge(tail, head, capacity=round(math.ldexp(capacity, bits)))
    _, (_, sink_side) = nx.minimum_cut(network, _SOURCE, _SINK, flow_func=preflow_push)
    return set(sink_side)
