"""Which plan is tried next: along each predicted front, from the fastest plan that should train healthily.

The sites that run low in a plan of a front are among those of every faster one, so that what the exact one breaks, the
faster ones break too. From a plan that is faithful the walk goes on to faster ones, from one that is not to more exact
ones, in growing strides; it ends between two neighbors. Where predicted errors tell plans apart, that takes two trials.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from autoprec.analysis.faults import healthy_error
from autoprec.records.run import TrialRecord
from autoprec.search.choices import goes_beyond
from autoprec.search.plans import Plan

Predict: TypeAlias = Callable[[Plan], float | None]

_MOST_OF_A_FRONT, _NUM_SPREAD = 6, 5


def next_plan(
    planned: Sequence[Plan], trials: Sequence[TrialRecord], gradient_error: Predict, *, is_whole: bool = False
) -> Plan | None:
    """Return the plan to try next, in the order of `planned`, whose fronts begin with their fastest plans; None: done.

    Fronts of different formats and layouts take turns. What lies beyond the marks is tried only beside a faithful plan.
    With `is_whole`, more exact plans are tried too, which are slower: for a front of several goals.
    """
    tried = {trial.name: trial for trial in trials if trial.kind == "plan"}
    fronts: defaultdict[str, list[Plan]] = defaultdict(list)
    for plan in planned:
        if plan.front:
            fronts[plan.front].append(plan)
    for plan in planned:
        if not plan.front and plan.name not in tried:
            return plan
        if plan.front and fronts:
            turns = _by_turns(fronts, tried)
            found = [each for front in turns if (each := _along(front, tried, gradient_error))]
            found += [each for front in turns if is_whole and (each := _spread(front, tried))]
            if found:
                return found[0]
            fronts.clear()
    return None


def _by_turns(fronts: Mapping[str, Sequence[Plan]], tried: Mapping[str, TrialRecord]) -> list[Sequence[Plan]]:
    return sorted(fronts.values(), key=lambda front: sum(plan.name in tried for plan in front))


def _along(front: Sequence[Plan], tried: Mapping[str, TrialRecord], gradient_error: Predict) -> Plan | None:
    """Return the next plan of one front, the fastest plan first; None where its walk has ended."""
    places = {place: tried[plan.name] for place, plan in enumerate(front) if plan.name in tried}
    if not places:
        return front[_start(front, gradient_error)]
    if len(places) >= _MOST_OF_A_FRONT:
        return None
    good = [place for place, trial in places.items() if _leads_on(trial)]
    if not good:
        last = max(places)
        return front[min(last + 2 ** (len(places) - 1), len(front) - 1)] if last < len(front) - 1 else None
    is_shown = any(places[place].fidelity is not None for place in good)
    first = 0 if is_shown else sum(goes_beyond(plan.choice) for plan in front)
    fastest = min(good)
    too_fast = max((place for place in places if place < fastest), default=first - 1)
    if fastest - too_fast <= 1:
        return None
    return front[max(fastest - 2 ** (len(good) - 1), first) if too_fast < first else (fastest + too_fast) // 2]


def _spread(front: Sequence[Plan], tried: Mapping[str, TrialRecord]) -> Plan | None:
    """Return the next of a few plans that are evenly spread over a front, both ends among them."""
    cuts = [plan for plan in front if not goes_beyond(plan.choice)]
    last = max(min(len(cuts), _NUM_SPREAD) - 1, 1)
    chosen = [cuts[round(place * (len(cuts) - 1) / last)] for place in range(last + 1)] if cuts else []
    return next((plan for plan in chosen if plan.name not in tried), None)


def _start(front: Sequence[Plan], gradient_error: Predict) -> int:
    """Return the place of the fastest plan whose predicted error a healthy step may show; the last one if none has."""
    for place, plan in enumerate(front):
        error = gradient_error(plan)
        if not goes_beyond(plan.choice) and (error is None or error <= healthy_error(str(plan.choice["low"]))):
            return place
    return len(front) - 1


def _leads_on(trial: TrialRecord) -> bool:
    """Return whether faster plans are worth a try: it is faithful, or was ended for being no faster than another."""
    if trial.fidelity is None:
        return trial.speedup is not None and trial.speedup.value >= 1
    return trial.fidelity.passed and trial.state in ("complete", "duplicate")
