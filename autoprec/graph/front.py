"""The predicted Pareto front: what is optimal at any price of error, from none to infinite.

At a fixed assignment, the objective is a line over the price of error: cost + price x error. What is optimal somewhere
is the lower envelope of these lines. Between two neighbors that are known, the price at which their lines meet is
tried: either a third assignment lies below the crossing, and both gaps are searched in turn, or there is none.

With the price only the arcs from the source grow, so that optimal cuts are nested: what is FP32 at one price is FP32 at
every higher one. A gap therefore holds only the units on which its two ends differ, and the networks become small fast.

Source: Eisner and Severance 1976, Mathematical techniques for efficient record segmentation in large shared databases
(the search of the envelope); Gallo, Grigoriadis and Tarjan 1989, A fast parametric maximum flow algorithm and
applications, section 2.1 (nested cuts).
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from autoprec.errors import MeasurementError
from autoprec.graph.costs import Planned
from autoprec.graph.cut import Prices, lowered, planned
from autoprec.graph.cut_problem import CutProblem, spent

# An assignment counts as better at a crossing if it saves more than this part of what lies between the two that cross.
_RESOLUTION = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gap:
    """Two optima, the units in which they differ, and by how much the exact one is dearer and better."""

    cheap: bytes
    exact: bytes
    units: tuple[int, ...]
    seconds: float
    error: float

    @property
    def price(self) -> float:
        """Return the price of error at which both are equally good."""
        return self.seconds / self.error


def sweep(problem: CutProblem, *, byte_price: float = 0.0, max_plans: int | None = None) -> tuple[Planned, ...]:
    """Return the assignments that are optimal at some price of error, from the fastest to the most exact.

    One stands for all that are optimal at the same single price. With `max_plans`, the widest gaps are searched first,
    and the search ends with that many. No plan dominates another.

    Raises: `MeasurementError` for a price of bytes that is none, and for less than 2 plans.
    """
    if max_plans is not None and max_plans < 2:
        raise MeasurementError(
            f"cannot sweep for {max_plans} plans; allowed: at least 2, the fastest and the most exact"
        )
    fastest, most_exact = Prices(error=0.0, byte=byte_price), Prices(error=math.inf, byte=byte_price)
    units = range(len(problem.units))
    first = lowered(problem, fastest, bytes(len(problem.sites)), units)
    last = lowered(problem, most_exact, first, [unit for unit in units if first[problem.units[unit][0]]])
    found = {first: 0.0} if first == last else {first: 0.0, last: math.inf}
    for price, codes in _between(problem, _gap(problem, first, last, units, byte_price), byte_price):
        if max_plans is not None and len(found) >= max_plans:
            break
        found[codes] = price
    return tuple(planned(problem, codes, price) for codes, price in sorted(found.items(), key=lambda each: each[1]))


def _between(problem: CutProblem, whole: _Gap, byte_price: float) -> Iterator[tuple[float, bytes]]:
    """Yield the optimal assignments inside a gap, each with a price at which it is one; the widest gaps first."""
    number = count()  # of equally wide gaps, the one found first
    gaps = [(0.0, next(number), whole)]
    while gaps:
        _, _, gap = heapq.heappop(gaps)
        if gap.seconds <= 0 or gap.error <= 0:
            continue
        codes = lowered(problem, Prices(error=gap.price, byte=byte_price), gap.cheap, gap.units)
        if codes in (gap.cheap, gap.exact):
            continue
        left = _gap(problem, gap.cheap, codes, gap.units, byte_price)
        if gap.price * left.error - left.seconds > _RESOLUTION * gap.seconds:
            yield gap.price, codes
            for part in (left, _gap(problem, codes, gap.exact, gap.units, byte_price)):
                heapq.heappush(gaps, (-part.seconds * part.error, next(number), part))


def _gap(problem: CutProblem, cheap: bytes, exact: bytes, among: Iterable[int], byte_price: float) -> _Gap:
    """Return the gap between two assignments that differ in no units but some of these."""
    units = tuple(unit for unit in among if any(cheap[site] != exact[site] for site in problem.units[unit]))
    sites = [site for unit in units for site in problem.units[unit]]
    casts = dict.fromkeys(place for unit in units for place in problem.touching[unit])
    one, other = spent(problem, cheap, sites, casts), spent(problem, exact, sites, casts)
    prices = Prices(error=0.0, byte=byte_price)
    seconds = prices.cost(other) - prices.cost(one)
    return _Gap(cheap=cheap, exact=exact, units=units, seconds=seconds, error=one.error - other.error)
