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
from collections.abc import Iterator
from itertools import count

from autoprec.errors import MeasurementError
from autoprec.graph.costs import Planned
from autoprec.graph.cut import Prices, lowered, planned
from autoprec.graph.cut_problem import CutProblem, spent

# An assignment counts as better at a crossing if it saves more than this part of what lies between the two that cross.
_RESOLUTION = 1e-9


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
    free, exact = Prices(error=0.0, byte=byte_price), Prices(error=math.inf, byte=byte_price)
    first = lowered(problem, free, bytes(len(problem.sites)), range(len(problem.units)))
    last = lowered(problem, exact, first, [place for place, unit in enumerate(problem.units) if first[unit[0]]])
    found = {first: 0.0} if first == last else {first: 0.0, last: math.inf}
    for price, codes in _between(problem, first, last, byte_price):
        if max_plans is not None and len(found) >= max_plans:
            break
        found[codes] = price
    return tuple(planned(problem, codes, price) for codes, price in sorted(found.items(), key=lambda each: each[1]))


def _between(problem: CutProblem, first: bytes, last: bytes, byte_price: float) -> Iterator[tuple[float, bytes]]:
    """Yield the optimal assignments between two others, each with a price at which it is; widest gaps first."""
    number = count()  # of equally wide gaps, the one found first
    gaps: list[tuple[float, int, bytes, bytes]] = []

    def note(cheap: bytes, exact: bytes) -> None:
        seconds, error = _apart(problem, cheap, exact, byte_price)
        heapq.heappush(gaps, (-seconds * error, next(number), cheap, exact))

    note(first, last)
    while gaps:
        _, _, cheap, exact = heapq.heappop(gaps)
        seconds, error = _apart(problem, cheap, exact, byte_price)
        if seconds <= 0 or error <= 0:
            continue
        price = seconds / error
        codes = lowered(problem, Prices(error=price, byte=byte_price), cheap, _differing(problem, cheap, exact))
        if codes in (cheap, exact):
            continue
        dearer, less = _apart(problem, cheap, codes, byte_price)
        if price * less - dearer > _RESOLUTION * seconds:
            yield price, codes
            note(cheap, codes)
            note(codes, exact)


def _differing(problem: CutProblem, one: bytes, other: bytes) -> list[int]:
    """Return the units that have a site on which the two assignments differ."""
    if one == other:
        return []
    return list(
        dict.fromkeys(
            problem.unit_of[site] for site, codes in enumerate(zip(one, other, strict=True)) if codes[0] != codes[1]
        )
    )


def _apart(problem: CutProblem, cheap: bytes, exact: bytes, byte_price: float) -> tuple[float, float]:
    """Return how many seconds `exact` costs more than `cheap`, and by how much its error is less."""
    units = _differing(problem, cheap, exact)
    sites = [site for unit in units for site in problem.units[unit]]
    casts = dict.fromkeys(place for unit in units for place in problem.touching[unit])
    one, other = spent(problem, cheap, sites, casts), spent(problem, exact, sites, casts)
    prices = Prices(error=0.0, byte=byte_price)
    return prices.cost(other) - prices.cost(one), one.error - other.error
