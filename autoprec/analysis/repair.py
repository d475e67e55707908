"""The smallest set of sites that must stay in FP32 for a step to be as healthy as in FP32.

What is tried is the step itself: low only there, and FP32 only there. Sites of equal layers that run on one line of the
user's code are tried as one unit first, and told apart at the end.

Source: the reduction to a set none of whose members can be left out is that of delta debugging (Zeller and Hildebrandt
2002, Simplifying and Isolating Failure-Inducing Input, section 3.2, 1-minimality). Here it starts from suspects found
by bisection, in the order of the damage that each does alone, which needs far fewer steps than all subsets.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autoprec.analysis.deadline import NEVER, Deadline
from autoprec.analysis.faults import FormatCheck
from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import Reference, damage
from autoprec.analysis.reduction import reduced
from autoprec.graph.layers import layers_of
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site

Unit: TypeAlias = tuple[Site, ...]

# A unit that alone does less than this fraction of the allowed error is no suspect.
_SUSPECT = 1 / 8
# A further unit joins a repair that would do without it, if it divides the error that is left by this.
_WORTHWHILE = 4.0
# An error of that many times what rounding the weights does is left as it is.
_CHAOS = 2.0
# Units of more sites than that (an unrolled loop) are not told apart.
_MOST_SITES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """The sites that FP32 is needed at, in order of execution, in one format.

    `error` is the gradient error with them in FP32 and all others low; `alone` says for each site what its unit does to
    an otherwise FP32 step; `is_minimal` is False where the search ended early or nothing but FP32 helped.
    """

    format: str
    sites: tuple[Site, ...]
    error: float
    alone: Mapping[Site, float]
    num_steps: int
    is_minimal: bool


def find_repair(
    references: Sequence[Reference],
    fmt: LowFormat,
    check: FormatCheck,
    sites: Sequence[Site],
    max_steps: int,
    deadline: Deadline = NEVER,
) -> Repair:
    """Return the smallest repair that delta debugging finds for a step that the format breaks.

    Ends after `max_steps` steps or at the deadline, and one a batch to tell the error of what was found until then.
    """
    search = _Search(
        references=references, fmt=fmt, check=check, sites=tuple(sites), max_steps=max_steps, deadline=deadline
    )
    units = units_of([each.recording.op_graph for each in references], sites)
    try:
        suspects = search.suspects(units)
        chosen = search.smallest(suspects, units)
        chosen = search.worthwhile(chosen, suspects)
        chosen = search.told_apart(chosen)
        is_minimal = True
    except _OutOfSteps:
        chosen, is_minimal = search.best, False
        # To tell the error of what it ended with:
        search.max_steps, search.deadline = search.num_steps + len(references), NEVER
    kept = {site for unit in chosen for site in unit}
    return Repair(
        format=fmt.name,
        sites=tuple(site for site in sites if site in kept),
        error=search.error_without(chosen),
        alone={site: search.alone.get(site, math.nan) for site in kept},
        num_steps=search.num_steps,
        is_minimal=is_minimal,
    )


def units_of(graphs: Iterable[OpGraph], sites: Sequence[Site]) -> tuple[Unit, ...]:
    """Return the sites in groups of one op on one source line of layers with the same pattern, in order."""
    groups: dict[tuple[str, str, str], dict[Site, None]] = {}
    wanted = set(sites)
    for graph in graphs:
        patterns = {layer.name: layer.pattern for layer in layers_of(graph)}
        for node in graph.calls():
            if node.site in wanted:
                assert node.site is not None
                key = (patterns.get(node.site.module, node.site.module), node.op, node.source)
                groups.setdefault(key, {})[node.site] = None
    taken: set[Site] = set()
    units = []
    for group in groups.values():  # a site that runs on several lines belongs to the first
        unit = tuple(site for site in group if site not in taken)
        taken.update(unit)
        if unit:
            units.append(unit)
    return tuple(units)


class _OutOfSteps(Exception):  # noqa: N818  ends a search, is no error
    pass


@dataclass
class _Search:
    """The state of one search: what was tried."""

    references: Sequence[Reference]
    fmt: LowFormat
    check: FormatCheck
    sites: tuple[Site, ...]
    max_steps: int
    deadline: Deadline = NEVER
    num_steps: int = 0
    alone: dict[Site, float] = field(default_factory=dict)
    best: tuple[Unit, ...] = ()
    _tried: dict[frozenset[Site], float] = field(default_factory=dict)

    def suspects(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Return the units that do damage by themselves, the worst first; found by bisection."""
        found = sorted(self._bisected(units), key=lambda item: -item[0])
        for error, unit in found:
            self.alone.update(dict.fromkeys(unit, error))
        self.best = tuple(unit for _, unit in found)
        return self.best

    def _bisected(self, units: Sequence[Unit]) -> list[tuple[float, Unit]]:
        if not units:
            return []
        low = frozenset(site for unit in units for site in unit)
        error = self._error(low, forced=low)
        if error < _SUSPECT * self.check.repaired:
            return []
        if len(units) == 1:
            return [(error, units[0])]
        middle = len(units) // 2
        return [*self._bisected(units[:middle]), *self._bisected(units[middle:])]

    def smallest(self, suspects: Sequence[Unit], units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Return units none of which can be left out: in FP32 they mend the step."""
        rest = [unit for unit in units if unit not in set(suspects)]
        order = [*suspects, *rest]
        count = next((k for k in range(1, len(suspects) + 1) if self._passes(order[:k])), None)
        if count is None:
            count = self._first_that_passes(order, len(suspects))
        return reduced(order[:count], self._passes, self._note)

    def _first_that_passes(self, order: Sequence[Unit], low: int) -> int:
        """Return how many of the first units mend the step, by bisection above `low`."""
        high = len(order)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._passes(order[:middle]) else (middle, high)
        return high

    def _note(self, units: Sequence[Unit]) -> None:
        self.best = tuple(units)

    def worthwhile(self, chosen: tuple[Unit, ...], suspects: Sequence[Unit]) -> tuple[Unit, ...]:
        """Return `chosen` and the suspects that would still divide the error that is left by much."""
        for unit in suspects:
            error = self.error_without(chosen)
            if unit not in chosen and error > max(_SUSPECT * self.check.repaired, _CHAOS * self.check.floor):
                more = (*chosen, unit)
                if self.error_without(more) * _WORTHWHILE <= error:
                    chosen = more
        self.best = chosen
        return chosen

    def told_apart(self, chosen: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """Return `chosen` without those sites of its units that are not needed: by module, then one by one."""
        limit = max(self.error_without(chosen) * _WORTHWHILE, _SUSPECT * self.check.repaired)

        def is_enough(units: tuple[Unit, ...]) -> bool:
            return self._passes(units) and self.error_without(units) <= limit

        for split in (_by_module, _by_site):
            for unit in chosen:
                for part in split(unit):
                    fewer = tuple(tuple(site for site in each if site not in part) for each in chosen)
                    if len(part) < sum(map(len, chosen)) and is_enough(fewer):
                        chosen = fewer
        self.best = chosen
        return chosen

    def error_without(self, kept: Iterable[Unit]) -> float:
        """Return the error with `kept` in FP32 and everything else low."""
        fp32 = {site for unit in kept for site in unit}
        return self._error(frozenset(site for site in self.sites if site not in fp32), forced=frozenset())

    def _passes(self, kept: Iterable[Unit]) -> bool:
        return self.error_without(kept) <= self.check.repaired

    def _error(self, low: frozenset[Site], forced: frozenset[Site]) -> float:
        key = low | {_FORCED} if forced else low
        if key not in self._tried:
            self._tried[key] = max(self._errors(low, forced), default=0.0)
        return self._tried[key]

    def _errors(self, low: frozenset[Site], forced: frozenset[Site]) -> Iterable[float]:
        """Yield the error on each batch, the worst one first, up to the first that is not allowed."""
        first = self.references[self.check.batch]
        for reference in (first, *(each for each in self.references if each is not first)):
            if self.num_steps >= self.max_steps or self.deadline.is_over:
                raise _OutOfSteps
            self.num_steps += 1
            scale = self.check.damage.loss_scale
            error = damage(reference, self.fmt, low, loss_scale=scale, forced=forced).gradient_error
            yield error
            if error > self.check.repaired:
                return


_FORCED = Site("", "forced", 0)  # marks what was tried with ops that would rather follow their inputs


def _by_module(unit: Unit) -> Iterable[Unit]:
    groups: dict[str, list[Site]] = {}
    for site in unit:
        groups.setdefault(site.module, []).append(site)
    return [tuple(group) for group in groups.values()] if len(groups) > 1 else []


def _by_site(unit: Unit) -> Iterable[Unit]:
    return [(site,) for site in unit] if 1 < len(unit) <= _MOST_SITES else []
