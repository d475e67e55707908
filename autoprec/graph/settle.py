"""Units whose precision is certain without a flow: what they gain by it outweighs all the casts that it could cost.

Each unit that is settled tightens the bounds of its neighbors. What is left falls into small networks.

Source: Hansen, Jaumard and Mathon 1993, Constrained nonlinear 0-1 programming, section 3 (a variable is fixed where the
derivative of the objective by it has one sign, whatever the others are).
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

from autoprec.graph.cut_problem import FP32, Casts, CutProblem

# Whether a site is low, None where that is open.
_State: TypeAlias = Callable[[int], bool | None]

# Of a tensor with more readers than that (a mask, a table of rotations), any of them may be anything.
_MOST_READERS = 16


def settled(problem: CutProblem, codes: bytes, dearer: Mapping[int, float]) -> dict[int, bool]:
    """Return for some of the units in `dearer` whether they are low in the optimum with the fewest low sites.

    `dearer` says by how much low is dearer than FP32 in each open unit, casts aside; the sites of all others have the
    precision of their code.
    """
    known = {unit: False for unit, more in dearer.items() if more == float("inf")}

    def state(site: int) -> bool | None:
        if site == FP32:
            return False
        unit = problem.unit_of[site]
        return known.get(unit) if unit in dearer else bool(codes[site])

    waiting = deque(unit for unit in dearer if unit not in known)
    queued = set(waiting)
    while waiting:
        unit = waiting.popleft()
        queued.discard(unit)
        lowering, raising = dearer[unit], -dearer[unit]
        for place in problem.touching[unit]:
            more, less = _most_added(problem, unit, problem.casts[place], state)
            lowering += more
            raising += less
        if lowering < 0 or raising <= 0:
            known[unit] = lowering < 0
            neighbors = {
                near: None for place in problem.touching[unit] for near in _near(problem, problem.casts[place])
            }
            new = [near for near in neighbors if near in dearer and near not in known and near not in queued]
            waiting.extend(new)
            queued.update(new)
    return known


def _near(problem: CutProblem, casts: Casts) -> list[int]:
    if len(casts.readers) > _MOST_READERS:
        return []
    return [problem.unit_of[site] for site in (*casts.producers[:1], *casts.readers) if site != FP32]


def _most_added(problem: CutProblem, unit: int, casts: Casts, state: _State) -> tuple[float, float]:
    """Return the most that the casts of one tensor can add when a unit that touches it turns low, and FP32."""
    many = len(casts.readers) > _MOST_READERS
    others = (
        {None} if many else {state(site) for site in casts.readers if site == FP32 or problem.unit_of[site] != unit}
    )
    down, up = casts.down_s, casts.up_s
    if casts.producers and problem.unit_of[casts.producers[0]] == unit:
        return (
            (up if others - {True} else 0.0) - (down if True in others else 0.0),
            (down if others - {False} else 0.0) - (up if False in others else 0.0),
        )
    tensor = state(casts.producers[0]) if casts.producers else False
    lowering = 0.0 if True in others else down
    raising = 0.0 if False in others else up
    if tensor is True:
        lowering = 0.0 if others - {True} else -up
    if tensor is False:
        raising = 0.0 if others - {False} else -down
    return lowering, raising
