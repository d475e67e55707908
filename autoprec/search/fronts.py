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
from autoprec.analysis.site_errors import SiteErrors, site_errors
from autoprec.capture import Recording
from autoprec.graph.costs import OpCost, Planned, Precision
from autoprec.graph.cut import cut_problem, predicted
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
    """The plans of one low format that save time, the fastest first, and the errors they were made from."""

    low: str
    plans: tuple[FrontPlan, ...]
    errors: SiteErrors


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
        found[low] = front_of(model, low, errors, kept_in(marking.marks, low))
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
    swept = sweep(problem, max_plans=_MOST_PLANS)
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
    return Front(
        low=low,
        plans=tuple(plan for plan in plans if plan.saved_s > 0),
        errors=errors,
    )


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
