"""Fronts of plans: what is known of a step as costs, and plans as sites that run low."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.analysis.marks import Mark, Reason, ReasonCode
from autoprec.analysis.site_errors import SiteErrors
from autoprec.graph.costs import OpCost
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from autoprec.search.choices import CLASSES, dimensions, plan_names, targets_of
from autoprec.search.fronts import Fronts, beyond_of, front_of, kept_in
from autoprec.search.plans import plans
from tests.op_graphs import chain, node
from tests.unit.search.blocks import SPACE, layout, mark

GRAPH = chain(
    node("linear", "linear", module="one"),
    node("gelu", "gelu"),
    node("linear_1", "linear", module="two"),
    node("sum", "sum"),
)
ONE, GELU, TWO, SUM = (call.site for call in GRAPH.calls())


def model(**low_s: float) -> Any:
    """Return a cost model in which every op takes 2 ms in FP32, and what is given low."""
    costs = {name: OpCost(fp32_s=2e-3, low_s=seconds) for name, seconds in low_s.items()}
    return SimpleNamespace(op_graph=GRAPH, op_costs=lambda low: costs, cast_costs=lambda low: {})


def errors(**of: float) -> SiteErrors:
    sites = dict(zip(("linear", "gelu", "linear_1", "sum"), (ONE, GELU, TWO, SUM), strict=True))
    found = {sites[name]: error for name, error in of.items()}
    return SiteErrors(format="bf16", errors=found, num_units=4, num_measured=4, rank_correlation=0.5)


def test_the_fastest_plan_lowers_all_that_saves_time_and_the_others_spare_what_errs_most():
    front = front_of(
        model(linear=1e-3, gelu=3e-3, linear_1=1e-3, sum=1e-3), "bf16",
        errors(linear=1e-4, gelu=1e-6, linear_1=1e-2, sum=1e-6), kept=(),
    )  # fmt: skip
    assert front.plans[0].low_sites == {ONE, TWO, SUM}
    assert front.plans[0].saved_s == pytest.approx(3e-3)
    assert front.plans[0].error == pytest.approx(math.sqrt(1e-2 + 1e-4 + 1e-6))
    assert front.plans[1].low_sites == {ONE, SUM}
    saved, wrong = ([getattr(plan, name) for plan in front.plans] for name in ("saved_s", "error"))
    assert saved == sorted(saved, reverse=True)
    assert wrong == sorted(wrong, reverse=True)


def test_what_must_stay_or_is_unknown_or_was_not_timed_is_in_no_plan():
    front = front_of(
        model(linear=1e-3, linear_1=1e-3, sum=1e-3), "bf16",
        errors(linear=1e-4, gelu=1e-6, linear_1=math.inf, sum=1e-6), kept=(SUM,),
    )  # fmt: skip
    assert [plan.low_sites for plan in front.plans] == [{ONE}]


def test_nothing_that_is_slower_low_is_planned():
    front = front_of(model(linear=2e-2, gelu=2e-2), "bf16", errors(linear=1e-4, gelu=1e-4), kept=())
    assert front.plans == ()


def test_faults_and_unknown_ops_are_kept():
    unknown = Site("m", "fused_thing_of_tomorrow", 0)
    marks = [
        Mark(site=ONE, format="bf16", verdict="must"),
        Mark(site=TWO, format="fp16", verdict="must"),
        Mark(site=SUM, format="bf16", verdict="prefer"),
        Mark(site=unknown, format="bf16", verdict="prefer"),
    ]
    assert kept_in(marks, "bf16") == {ONE, unknown}


def test_a_record_has_every_plan_and_how_its_errors_came_about():
    front = front_of(model(linear=1e-3), "bf16", errors(linear=1e-4), kept=())
    times = SimpleNamespace(num_signatures=4, num_from_cache=1, num_unmeasured=2, measured_s=0.5)
    record = Fronts(by_format={"bf16": front}, cost_model=SimpleNamespace(op_times=times)).record()  # type: ignore[arg-type]
    (plan,) = record.plans
    assert (plan.low, plan.num_low_sites, plan.saved_s) == ("bf16", 1, pytest.approx(1e-3))
    assert (record.num_signatures, record.num_from_cache, record.num_unmeasured, record.op_times_s) == (4, 1, 2, 0.5)
    assert (record.errors["bf16"].num_measured, record.errors["bf16"].rank_correlation) == (4, 0.5)


def planned_layout(*fronts: frozenset[Site]) -> Any:
    return replace(layout(), fronts={"bf16": fronts})


def free_sites(found: Any) -> list[Site]:
    return [site for site in found.sites if found.verdict(site, "bf16") == "free"]


def test_a_choice_may_start_from_a_plan_and_edit_it_by_layer():
    first, second = free_sites(layout())[:2]
    found = planned_layout(frozenset({first, second}), frozenset({first}))
    assert plan_names(found) == (CLASSES, "cut-0", "cut-1")
    assert plan_names(planned_layout()) == plan_names(layout()) == (CLASSES,)
    rows = dimensions(SPACE, found)
    assert next(row for row in rows if row.name == "plan").default == CLASSES
    start = {"low": "bf16", "plan": "cut-0"}
    targets, why = targets_of(start, found)
    assert {site for site, target in targets.items() if target == "bf16"} == {first, second}
    assert all(
        "planned" in why[site] or found.verdict(site, "bf16") == "must"
        for site in targets
        if site not in (first, second)
    )
    targets, _ = targets_of(start | {f"layer:{found.layer[first]}": "fp32"}, found)
    assert targets[first] == "fp32"
    targets, _ = targets_of({"low": "bf16", "plan": "cut-9"}, found)  # a front that is shorter than another one
    assert {site for site, target in targets.items() if target == "bf16"} == {first}


def test_a_fault_stays_in_fp32_whatever_a_plan_of_the_front_says_and_runs_low_only_beyond_it():
    fault, other, *_ = free_sites(layout())
    marked = layout(extra=(mark(fault, "bf16", "must", "cancels"),))
    everything, fewer = frozenset(marked.sites), frozenset({fault, other})
    found = replace(marked, fronts={"bf16": (everything,)}, beyond={"bf16": (fewer, everything)})
    assert plan_names(found) == (CLASSES, "cut-0", "beyond-0", "beyond-1")
    for plan, low in (("cut-0", False), (CLASSES, False), ("beyond-0", True), ("beyond-1", True)):
        targets, why = targets_of({"low": "bf16", "plan": plan}, found)
        assert (targets[fault], why.get(fault)) == (("bf16", None) if low else ("fp32", "cancels"))
    targets, _ = targets_of({"low": "bf16", "plan": "beyond-0"}, found)
    assert {site for site, target in targets.items() if target == "bf16"} == fewer
    # A format beyond whose front nothing lies has its fastest plan there; one without any front, the classes.
    alone = replace(found, beyond={})
    assert targets_of({"low": "bf16", "plan": "beyond-1"}, alone) == targets_of({"low": "bf16", "plan": "cut-0"}, found)
    none = replace(found, fronts={}, beyond={})
    assert targets_of({"low": "bf16", "plan": "beyond-1"}, none) == targets_of({"low": "bf16"}, none)


def marked(where: Site, code: ReasonCode) -> Mark:
    return Mark(site=where, format="bf16", verdict="must", reasons=(Reason(code=code, detail="lost"),))


def test_beyond_marks_lie_plans_that_gain_enough_at_an_error_that_a_run_may_spare():
    times = model(linear=1e-3, gelu=1e-3, linear_1=1.0e-3, sum=1e-3)
    known = errors(linear=1e-4, gelu=0.04, linear_1=0.25, sum=4.0)
    marks = [marked(each, ReasonCode.CANCELLATION) for each in (GELU, TWO, SUM)]
    front = front_of(times, "bf16", known, kept_in(marks, "bf16"))
    assert [plan.low_sites for plan in front.plans] == [{ONE}]
    found = beyond_of(times, front, marks)
    assert [plan.low_sites for plan in found] == [{ONE, GELU}, {ONE, GELU, TWO}], "an error of 2 is hopeless"
    assert [plan.error for plan in found] == pytest.approx([math.sqrt(0.0401), math.sqrt(0.2901)])
    assert beyond_of(times, front, ()) == ()
    little = model(linear=1e-3, gelu=2e-3 - 3e-5)
    assert beyond_of(little, front_of(little, "bf16", known, (GELU,)), marks[:1]) == (), "0.75 % of the step"


@pytest.mark.parametrize("code", [ReasonCode.OVERFLOW, ReasonCode.NO_KERNEL, ReasonCode.KERNEL_WRONG])
def test_what_is_broken_however_a_run_goes_is_in_no_plan(code: ReasonCode):
    times, known = model(linear=1e-3, gelu=1e-3), errors(linear=1e-4, gelu=0.04)
    marks = [marked(GELU, code)]
    assert beyond_of(times, front_of(times, "bf16", known, (GELU,)), marks) == ()
    certain = errors(linear=1e-4, gelu=math.inf)
    marks = [marked(GELU, ReasonCode.MAGNIFIED)]
    assert beyond_of(times, front_of(times, "bf16", certain, (GELU,)), marks) == (), "alone it makes the step infinite"


def test_plans_of_the_front_are_tried_first():
    first = free_sites(layout())[0]
    rows = dimensions(SPACE, planned_layout(frozenset({first})))
    names = [plan.name for plan in plans(rows)]
    assert names[0] == "cut-0-bf16"
    assert any(name.startswith("free-ops") for name in names[1:])


def test_graphs_of_these_tests_are_what_they_look_like():
    assert isinstance(GRAPH, OpGraph)
    assert [str(site) for site in (ONE, TWO)] == ["one:linear#0", "two:linear#0"]
