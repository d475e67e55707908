import math

import pytest

from autoprec.errors import MeasurementError, PolicyError
from autoprec.graph.cut import (
    CastCost,
    OpCost,
    Planned,
    Prediction,
    cheapest,
    cut_problem,
    dominates,
    predicted,
    undominated,
)
from autoprec.graph.front import sweep
from autoprec.graph.site import Site
from tests.op_graphs import chain, node, op_graph

X = node("x", kind="input")
OUT = node("out", kind="output", outputs=())
A, B, C = (node(name, "relu", index=index) for index, name in enumerate("abc"))


def cost(fp32_s=1.0, low_s=1.0, error=0.0, **more):
    return OpCost(fp32_s=fp32_s, low_s=low_s, error=error, **more)


def both(seconds, **more):
    return CastCost(down_s=seconds, up_s=seconds, **more)


def formats(plan):
    return "".join({"fp32": "F", "low": "l", "fp8": "8"}[each] for each in plan.assignment.values())


def fan(casts):
    """Return a problem in which three sites read one parameter."""
    graph = op_graph([node("w", kind="parameter"), A, B, C], [("w", "a"), ("w", "b"), ("w", "c")])
    return cut_problem(graph, dict.fromkeys("abc", cost(2.0, 1.0)), {"w": casts})


def test_an_island_that_costs_more_in_casts_than_it_saves_is_lowered():
    graph = chain(X, A, B, C)
    casts = {"a": both(0.3), "b": both(0.3)}
    matmul = cost(5.0, 1.0)
    lowered = cut_problem(graph, {"a": matmul, "b": cost(1.0, 1.5), "c": matmul}, casts)
    kept = cut_problem(graph, {"a": matmul, "b": cost(1.0, 1.7), "c": matmul}, casts)
    assert formats(cheapest(lowered, error_price=0.0)) == "lll"
    assert formats(cheapest(kept, error_price=0.0)) == "lFl"
    assert cheapest(kept, error_price=0.0).predicted.time_s == pytest.approx(1 + 0.3 + 1 + 0.3 + 1)


def test_a_cast_that_readers_share_is_paid_once():
    plan = cheapest(fan(both(1.5)), error_price=0.0)
    assert formats(plan) == "lll"
    assert plan.predicted.time_s == 3 * 1.0 + 1.5


def test_a_cast_that_readers_do_not_share_is_paid_by_each():
    problem = fan(both(1.5, shared=False))
    plan = cheapest(problem, error_price=0.0)
    assert formats(plan) == "FFF"
    assert predicted(problem, dict.fromkeys(plan.assignment, "low")).time_s == 3 * 2.5


def test_a_cast_up_is_shared_as_well():
    graph = op_graph([X, A, B, C], [("x", "a"), ("a", "b"), ("a", "c")])
    never = cost(1.0, math.inf)
    problem = cut_problem(graph, {"a": cost(3.0, 1.0), "b": never, "c": never}, {"a": both(1.5)})
    assert formats(cheapest(problem, error_price=0.0)) == "lFF"
    assert cheapest(problem, error_price=0.0).predicted.time_s == 1 + 1.5 + 2


def test_the_loss_ends_in_fp32():
    problem = cut_problem(chain(X, A, OUT), {"a": cost(2.0, 1.0)}, {"a": CastCost(down_s=0.0, up_s=1.25)})
    assert formats(cheapest(problem, error_price=0.0)) == "F"


def test_views_share_the_cast_of_what_they_look_at_unless_they_have_their_own():
    views = [node(name, "view", index=None) for name in ("v", "u")]
    graph = op_graph([X, *views, A, B], [("x", "v"), ("x", "u"), ("v", "a"), ("u", "b")])
    costs = dict.fromkeys("ab", cost())
    everything_low = {A.site: "low", B.site: "low"}
    assert predicted(cut_problem(graph, costs, {"x": both(1.0)}), everything_low).time_s == 3.0
    assert predicted(cut_problem(graph, costs, {"v": both(1.0), "x": both(4.0)}), everything_low).time_s == 7.0


def test_all_calls_of_a_site_follow_one_choice():
    again = node("again", "relu", index=0, call=1)
    problem = cut_problem(chain(X, A, again), {"a": cost(2.0, 1.0), "again": cost(1.0, 2.5)}, {})
    assert cheapest(problem, error_price=0.0).assignment == {A.site: "fp32"}
    assert predicted(problem, {A.site: "low"}).time_s == 3.5


def test_tied_sites_agree_and_fp8_is_a_choice_of_each():
    costs = {"a": cost(2.0, 1.0, fp8_s=0.5, fp8_error=0.0), "b": cost(1.0, 1.5), "c": cost(1.0, 2.0)}
    plan = cheapest(cut_problem(chain(X, A, B, C), costs, {}, ties=[(A.site, B.site)]), error_price=0.0)
    assert formats(plan) == "8lF"


def test_results_that_one_call_left_alone_reads_agree_where_its_result_may_be_cast():
    kept = node("k", "mul", index=7, left_alone=True)
    graph = op_graph([X, A, B, kept, OUT], [("x", "a"), ("x", "b"), ("a", "k"), ("b", "k"), ("k", "out")])
    costs = {"a": cost(2.0, 1.0), "b": cost(1.0, 1.5)}
    assert formats(cheapest(cut_problem(graph, costs, {}), error_price=0.0)) == "lF"
    problem = cut_problem(graph, costs, {"k": both(0.125)})
    assert formats(cheapest(problem, error_price=0.0)) == "ll"
    assert predicted(problem, {A.site: "low", B.site: "low"}).time_s == 2.5 + 0.125
    assert predicted(problem, {A.site: "low"}).time_s == 2.0


def test_the_price_of_error_takes_a_matmul_from_fp8_to_low_to_fp32():
    problem = cut_problem(chain(X, A), {"a": cost(4.0, 2.0, 1.0, fp8_s=1.0, fp8_error=5.0)}, {})
    assert [formats(cheapest(problem, error_price=price)) for price in (0.0, 0.2, 0.3, 1.9, 2.1, math.inf)] == [
        *"88llFF"
    ]
    assert [(formats(plan), plan.predicted.time_s) for plan in sweep(problem)] == [("8", 1.0), ("l", 2.0), ("F", 4.0)]


def test_without_any_gain_a_site_stays_fp32():
    problem = cut_problem(chain(X, A, B), dict.fromkeys("ab", cost()), {"x": both(0.0)})
    assert formats(cheapest(problem, error_price=0.0)) == "FF"


def test_at_an_infinite_price_what_has_no_error_still_runs_low():
    problem = cut_problem(chain(X, A, B), {"a": cost(2.0, 1.0, 1e-30), "b": cost(2.0, 1.0)}, {})
    assert formats(cheapest(problem, error_price=math.inf)) == "Fl"


def test_a_price_of_bytes_saves_memory():
    problem = cut_problem(chain(X, A), {"a": cost(1.0, 1.5, fp32_bytes=4, low_bytes=2)}, {})
    assert formats(cheapest(problem, error_price=0.0, byte_price=0.2)) == "F"
    plan = cheapest(problem, error_price=0.0, byte_price=0.3)
    assert (formats(plan), plan.predicted.bytes) == ("l", 2)


def test_a_sweep_that_ends_early_has_both_ends_and_the_widest_gap():
    errors = {"a": 1.0, "b": 2.0, "c": 100.0}
    graph = chain(X, A, B, C)
    problem = cut_problem(graph, {name: cost(2.0, 1.0, error) for name, error in errors.items()}, {})
    assert [formats(plan) for plan in sweep(problem)] == ["lll", "llF", "lFF", "FFF"]
    assert [formats(plan) for plan in sweep(problem, max_plans=3)] == ["lll", "llF", "FFF"]
    assert [plan.error_price for plan in sweep(problem, max_plans=2)] == [0.0, math.inf]


def test_a_sweep_of_what_has_one_answer_is_that_answer():
    assert len(sweep(cut_problem(chain(X, A), {"a": cost(2.0, 1.0)}, {}))) == 1
    assert sweep(cut_problem(chain(X, OUT), {}, {}))[0].assignment == {}


def test_times_of_microseconds_and_of_ages_are_told_apart():
    costs = {"a": cost(1e-9, 2e-9), "b": cost(2e-9, 1e-9), "c": cost(1e9, math.inf)}
    assert formats(cheapest(cut_problem(chain(X, A, B, C), costs, {}), error_price=0.0)) == "FlF"


def plan_of(time_s, error, num_bytes):
    return Planned(assignment={}, predicted=Prediction(time_s=time_s, error=error, bytes=num_bytes), error_price=time_s)


def test_a_front_is_what_nothing_dominates():
    kept = [plan_of(1.0, 3.0, 5), plan_of(2.0, 1.0, 5), plan_of(3.0, 3.0, 1)]
    dropped = [plan_of(2.0, 1.0, 6), plan_of(2.0, 2.0, 5), plan_of(1.0, 3.0, 5)]
    assert undominated([*dropped[:2], *kept, dropped[2]]) == tuple(kept)
    assert dominates(kept[1].predicted, dropped[0].predicted)
    assert not dominates(kept[0].predicted, kept[0].predicted)
    assert not dominates(kept[0].predicted, kept[1].predicted)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"costs": {}}, "the call a of :relu#0 has no costs; give it an OpCost"),
        ({"costs": {"a": cost(math.inf)}}, "costs inf s with error 0.0, 1.0 s with error 0.0"),
        ({"costs": {"a": cost(1.0, math.nan)}}, "allowed: a finite time in FP32"),
        ({"costs": {"a": cost(1.0, 1.0, -1.0)}}, "errors of at least 0"),
        ({"casts": {"x": both(-1.0)}}, "casting the result of x costs -1.0 s down"),
        ({"casts": {"x": both(math.inf)}}, "allowed: finite seconds of at least 0"),
    ],
)
def test_costs_that_no_cut_can_take_are_refused(wrong, message):
    with pytest.raises(MeasurementError, match=message):
        cut_problem(chain(X, A), **{"costs": {"a": cost()}, "casts": {}, **wrong})


@pytest.mark.parametrize("prices", [(-1.0, 0.0), (math.nan, 0.0), (0.0, -1.0), (0.0, math.inf), (0.0, math.nan)])
def test_prices_that_are_none_are_refused(prices):
    problem = cut_problem(chain(X, A), {"a": cost()}, {})
    with pytest.raises(MeasurementError, match="allowed: at least 0"):
        cheapest(problem, error_price=prices[0], byte_price=prices[1])


def test_a_sweep_for_one_plan_is_refused():
    with pytest.raises(MeasurementError, match="cannot sweep for 1 plans; allowed: at least 2"):
        sweep(cut_problem(chain(X, A), {"a": cost()}, {}), max_plans=1)


def test_sites_that_no_policy_casts_are_refused():
    other = Site("there", "relu", 0)
    with pytest.raises(PolicyError, match="cannot tie there:relu#0 to others"):
        cut_problem(chain(X, A), {"a": cost()}, {}, ties=[(A.site, other)])
    problem = cut_problem(chain(X, A), {"a": cost()}, {})
    with pytest.raises(PolicyError, match="cannot predict low at there:relu#0"):
        predicted(problem, {other: "low"})
    with pytest.raises(PolicyError, match='cannot predict "half" at :relu#0; allowed: fp32, low, fp8'):
        predicted(problem, {A.site: "half"})
