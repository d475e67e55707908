"""Fronts: the exact plans of each low format, from the fastest to the most faithful one.

Op and cast times are measured on the device, errors of sites on the recorded step; a minimum cut gives the best
assignment for each price of error (`autoprec.graph.cut`). What only a run can tell is left to the trials.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autoprec.analysis import Diagnosis, Mark, Marking
from autoprec.analysis.low_format import low_format
from autoprec.analysis.marks import OF_DEGREE
from autoprec.analysis.site_errors import SiteErrors, site_errors
from autoprec.capture import Recording
from autoprec.graph.costs import OpCost, Planned, Precision
from autoprec.graph.cut import CutProblem, cut_problem, predicted
from autoprec.graph.front import sweep
from autoprec.graph.site import Site
from autoprec.measure.op_time import measure_op_times
from autoprec.measure.paired import Limits
from autoprec.ops import lookup
from autoprec.records.planner import PlannerRecord, PlanRecord, SiteErrorsRecord
from autoprec.runtime.device import DeviceInfo
from autoprec.search.cost_model import CostModel

# Shares of the budget of a run: op times, which the disk keeps for the next one, and errors of sites.
_TIMES_SHARE, _ERRORS_SHARE = 0.15, 0.1
_LONGEST_S = 60.0
_MOST_PLANS = 12
# Beyond marks: a trial must be predicted to save this part of a step, and no gradient may be off by more than its norm.
_MOST_BEYOND, _WORTH_FRAC, _HOPELESS_ERROR = 4, 0.01, 1.0
_NO_COST = OpCost(fp32_s=0.0, low_s=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPlan:
    """One plan of a front: the sites that run low, the seconds of ops and casts it saves, and its predicted error.

    `error` is the relative gradient error, as if errors of different sites were independent. Of the sites that run low,
    `float8_sites` multiply in FP8.
    """

    low_sites: frozenset[Site]
    saved_s: float
    error: float
    float8_sites: frozenset[Site] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """The plans of one low format that save time, the fastest first, and the errors they were made from.

    Those `beyond` lower sites that are marked to stay FP32, as few as gain enough, the most exact first. They are worth
    a trial once the others are known to be faithful: then a run says whether it spares the digits that are lost there.
    """

    low: str
    plans: tuple[FrontPlan, ...]
    errors: SiteErrors
    beyond: tuple[FrontPlan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fronts:
    """The front of each low format, and the cost model behind them."""

    by_format: Mapping[str, Front]
    cost_model: CostModel

    def record(self) -> PlannerRecord:
        """Return the fronts as records hold them."""
        times = self.cost_model.op_times
        plans = [
            PlanRecord(low=low, num_low_sites=len(plan.low_sites), saved_s=plan.saved_s, error=plan.error)
            for low, front in self.by_format.items()
            for plan in front.plans
        ]
        errors = {low: _errors_record(front.errors) for low, front in self.by_format.items()}
        return PlannerRecord(
            plans=tuple(plans),
            num_signatures=times.num_signatures,
            num_from_cache=times.num_from_cache,
            num_unmeasured=times.num_unmeasured,
            op_times_s=times.measured_s,
            errors=errors,
        )


def fronts_of(
    recording: Recording,
    marking: Marking,
    lows: Sequence[str],
    device: DeviceInfo,
    lowerable: Collection[Site],
    budget_s: float,
) -> Fronts:
    """Return the fronts of a recorded step. Costs up to a quarter of `budget_s`."""
    limits = Limits(total_s=min(_TIMES_SHARE * budget_s, _LONGEST_S))
    op_times = measure_op_times(recording, tuple(lows), device, limits=limits)
    model = CostModel(op_graph=recording.op_graph, op_times=op_times)
    diagnoses = {each.format: each for each in marking.diagnoses}
    found = {}
    for low in lows:
        fmt = low_format(low, device.kind, device.native_formats)
        scale = loss_scale_of(diagnoses.get(low))
        sites = [site for site in recording.op_graph.sites() if site in lowerable]
        errors = site_errors(
            marking.references[0], fmt, sites, loss_scale=scale, max_s=_ERRORS_SHARE * budget_s / len(lows)
        )
        front = front_of(model, low, errors, kept_in(marking.marks, low))
        found[low] = replace(front, beyond=beyond_of(model, front, marking.marks))
    return Fronts(by_format=found, cost_model=model)


def kept_in(marks: Sequence[Mark], low: str) -> frozenset[Site]:
    """Return the sites that no plan lowers: faults that were seen, and ops that nothing is known of."""
    return frozenset(
        mark.site
        for mark in marks
        if mark.format == low and (mark.verdict == "must" or lookup(mark.site.op).family == "unknown")
    )


def front_of(
    model: CostModel, low: str, errors: SiteErrors, kept: Collection[Site], float8: SiteErrors | None = None
) -> Front:
    """Return the front of a low format; with `float8`, the errors of sites in FP8, that is a way of being low."""
    problem = cut_problem(model.op_graph, _costs(model, low, errors, kept, float8), model.cast_costs(low))
    return Front(low=low, plans=_swept(problem, _MOST_PLANS), errors=errors)


def beyond_of(model: CostModel, front: Front, marks: Sequence[Mark]) -> tuple[FrontPlan, ...]:
    """Return plans that lower sites in spite of their marks and are predicted to be faster than the whole front.

    A mark that says what breaks in any case is kept, and so is one whose site alone makes a step that is not finite.
    Sites of layers that are alike have one error and one time, so that the cut lowers them together.
    """
    low = front.low
    kept = kept_in([mark for mark in marks if not _is_of_degree(mark)], low)
    if kept == kept_in(marks, low):
        return ()
    problem = cut_problem(model.op_graph, _costs(model, low, front.errors, kept, None), model.cast_costs(low))
    worth_s = _WORTH_FRAC * predicted(problem, {}).time_s
    bar = max((plan.saved_s for plan in front.plans), default=0.0)
    found: list[FrontPlan] = []
    for plan in reversed(_swept(problem, 4 * _MOST_PLANS)):
        if plan.error <= _HOPELESS_ERROR and plan.saved_s > bar + worth_s:
            found.append(plan)
            bar = plan.saved_s
    return tuple(found[:_MOST_BEYOND])


def _is_of_degree(mark: Mark) -> bool:
    return mark.verdict == "must" and all(reason.code in OF_DEGREE for reason in mark.reasons[:1])


def _swept(problem: CutProblem, most: int) -> tuple[FrontPlan, ...]:
    """Return the plans that save time at some price of error, the fastest first."""
    swept = sweep(problem, max_plans=most)
    fp32_s = predicted(problem, {}).time_s
    plans = [
        FrontPlan(
            low_sites=_at(plan, "low", "fp8"),
            saved_s=fp32_s - plan.predicted.time_s,
            error=math.sqrt(plan.predicted.error),
            float8_sites=_at(plan, "fp8"),
        )
        for plan in swept
        if _at(plan, "low", "fp8")
    ]
    return tuple(plan for plan in plans if plan.saved_s > 0)


def _errors_record(errors: SiteErrors) -> SiteErrorsRecord:
    correlation = errors.rank_correlation
    return SiteErrorsRecord(
        num_units=errors.num_units,
        num_measured=errors.num_measured,
        rank_correlation=None if math.isnan(correlation) else correlation,
    )


def _at(plan: Planned, *precisions: Precision) -> frozenset[Site]:
    return frozenset(site for site, precision in plan.assignment.items() if precision in precisions)


def _costs(
    model: CostModel, low: str, errors: SiteErrors, kept: Collection[Site], float8: SiteErrors | None
) -> dict[str, OpCost]:
    """Return what each castable call costs, its share of its site's error with it."""
    timed = model.op_costs(low)
    num_calls = Counter(node.site for node in model.op_graph.calls())
    in_float8 = {} if float8 is None else float8.errors
    costs = dict(timed)
    for node in model.op_graph.calls():
        site = node.site
        assert site is not None
        error = math.inf if site in kept else errors.errors.get(site, math.inf) / num_calls[site]
        fp8_error = math.inf if site in kept else in_float8.get(site, math.inf) / num_calls[site]
        costs[node.name] = replace(timed.get(node.name, _NO_COST), error=error, fp8_error=fp8_error)
    return costs


def loss_scale_of(diagnosis: Diagnosis | None) -> float:
    """Return the loss scale that a format was diagnosed with; 1 without a diagnosis."""
    return 1.0 if diagnosis is None else diagnosis.check.damage.loss_scale
