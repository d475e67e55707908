"""The search for the smallest repair, on planted faults."""

import math
from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.analysis import repair
from autoprec.analysis.faults import FormatCheck
from autoprec.analysis.low_step import Damage
from autoprec.analysis.repair import Repair, find_repair, units_of
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from tests.op_graphs import chain, node

Errors = Callable[[frozenset[Site], bool], float]
FP16_REPAIRED = 2.75 * 2.0**-5.5
BROKEN = 1.0


def sites_of(count: int) -> tuple[Site, ...]:
    """Return sites that are a unit each."""
    return tuple(Site("", "mul", index) for index in range(count))


def graph_of(sites: Iterable[Site], source: Callable[[int], str] = str) -> OpGraph:
    nodes = [node(f"n{k}", each.op, module=each.module, index=each.index) for k, each in enumerate(sites)]
    for k, each in enumerate(nodes):
        object.__setattr__(each, "source", source(k))
    return chain(*nodes)


def search(
    errors: Errors | list[Errors], sites: tuple[Site, ...], *, graph: OpGraph | None = None, max_steps: int = 10_000,
    floor: float = 0.0,
) -> tuple[Repair, list[frozenset[Site]]]:  # fmt: skip
    """Return the repair that is found where a step with `low` in the format is off by `errors(low, forced)`."""
    batches = errors if isinstance(errors, list) else [errors]
    tried = []
    recording = SimpleNamespace(op_graph=graph or graph_of(sites))
    references = [SimpleNamespace(recording=recording, errors=each) for each in batches]

    def damage(reference: Any, fmt: Any, low: frozenset[Site], *, loss_scale: float, forced: frozenset[Site]) -> Damage:
        assert loss_scale == 64.0
        assert forced in (frozenset(), low)
        tried.append(low)
        return Damage(loss_error=0.0, gradient_error=reference.errors(low, bool(forced)))

    everything = frozenset(sites)
    worst = max(range(len(batches)), key=lambda k: batches[k](everything, False))
    check = FormatCheck(
        format="fp16", batch=worst, floor=floor,
        damage=Damage(loss_error=0.0, gradient_error=batches[worst](everything, False), loss_scale=64.0),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair, "damage", damage)
        found = find_repair(references, SimpleNamespace(name="fp16"), check, sites, max_steps)  # type: ignore[arg-type]
    assert found.num_steps == len(tried)
    return found, tried


def broken_by(*clauses: Collection[Site]) -> Errors:
    """Return the errors of a step that is broken if all sites of any clause are low."""
    return lambda low, forced: BROKEN if any(low.issuperset(clause) for clause in clauses) else 0.001


@st.composite
def planted(draw: st.DrawFn) -> tuple[tuple[Site, ...], list[frozenset[Site]]]:
    sites = sites_of(draw(st.integers(1, 40)))
    clause = st.frozensets(st.sampled_from(sites), min_size=1, max_size=3)
    return sites, draw(st.lists(clause, min_size=1, max_size=5))


@given(planted())
@settings(max_examples=60)
def test_what_is_found_mends_the_step_and_nothing_of_it_can_be_left_out(
    case: tuple[tuple[Site, ...], list[frozenset[Site]]],
) -> None:
    sites, clauses = case
    errors = broken_by(*clauses)
    found, _ = search(errors, sites)
    everything = frozenset(sites)
    assert found.error == errors(everything - set(found.sites), False) < FP16_REPAIRED
    assert found.is_minimal
    for each in found.sites:
        assert errors(everything - (set(found.sites) - {each}), False) == BROKEN, each
    assert found.sites == tuple(each for each in sites if each in set(found.sites))
    assert found.alone.keys() == set(found.sites)


@given(st.integers(1, 40), st.data())
@settings(max_examples=40)
def test_culprits_that_break_the_step_alone_are_found_exactly_and_in_few_steps(count: int, data: st.DataObject) -> None:
    sites = sites_of(count)
    culprits = data.draw(st.frozensets(st.sampled_from(sites), min_size=1, max_size=6))
    found, _ = search(broken_by(*({each} for each in culprits)), sites)
    assert set(found.sites) == culprits
    assert found.alone == dict.fromkeys(culprits, BROKEN)
    # Bisection: two steps for each level above a culprit. Then one for each culprit that is added, and as many again
    # for each size of what is left out, down to single ones.
    levels = math.ceil(math.log2(count)) if count > 1 else 0
    assert found.num_steps <= 1 + 2 * levels * len(culprits) + 3 * len(culprits) + 2


@given(planted(), st.integers(1, 60))
@settings(max_examples=60)
def test_a_search_that_is_cut_short_says_so(
    case: tuple[tuple[Site, ...], list[frozenset[Site]]], max_steps: int
) -> None:
    sites, clauses = case
    whole, _ = search(broken_by(*clauses), sites)
    found, _ = search(broken_by(*clauses), sites, max_steps=max_steps)
    assert found.num_steps <= max_steps + 1  # one more for the error of what it ends with
    assert found.is_minimal is (whole.num_steps <= max_steps)
    assert found.error == broken_by(*clauses)(frozenset(sites) - set(found.sites), False)
    if found.is_minimal:
        assert found == whole


def test_sites_that_break_the_step_only_together_do_no_damage_alone() -> None:
    sites = sites_of(16)
    found, _ = search(broken_by({sites[2], sites[13]}), sites)
    assert found.sites in ((sites[2],), (sites[13],))
    assert math.isnan(found.alone[found.sites[0]])


def test_a_batch_that_only_another_site_breaks_counts() -> None:
    sites = sites_of(8)
    found, _ = search([broken_by({sites[1]}), broken_by({sites[6]}), broken_by()], sites)
    assert found.sites == (sites[1], sites[6])


def test_a_further_site_that_divides_what_is_left_by_much_is_worthwhile() -> None:
    sites = sites_of(8)

    def errors(low: frozenset[Site], forced: bool) -> float:
        return (BROKEN if sites[1] in low else 0.0) + (0.04 if sites[5] in low else 0.0) + 0.001

    found, _ = search(errors, sites)  # 0.04 is healthy, under 0.06
    assert found.sites == (sites[1], sites[5])
    assert found.alone == {sites[1]: 1.041 - 0.04, sites[5]: pytest.approx(0.041)}
    chaos, _ = search(errors, sites, floor=0.03)  # and no more than what rounding the weights does
    assert chaos.sites == (sites[1],)


def test_a_further_site_that_changes_little_is_not() -> None:
    sites = sites_of(8)

    def errors(low: frozenset[Site], forced: bool) -> float:
        return (BROKEN if sites[1] in low else 0.0) + (0.02 if sites[5] in low else 0.0) + 0.02

    found, _ = search(errors, sites)
    assert found.sites == (sites[1],)


def test_what_is_tried_alone_is_forced_and_what_is_left_out_is_not() -> None:
    sites = sites_of(8)

    def errors(low: frozenset[Site], forced: bool) -> float:
        return BROKEN if sites[3] in low or (sites[4] in low and forced) else 0.0

    found, tried = search(errors, sites)  # alone, 4 does damage; with 3 in FP32 it follows what it reads
    assert found.sites == (sites[3],)
    assert frozenset({sites[4]}) in tried


def blocks(count: int) -> tuple[OpGraph, tuple[Site, ...]]:
    """Return the graph of equal blocks of three ops, each op on its line."""
    sites = tuple(Site(f"blocks.{block}", op, 0) for block in range(count) for op in ("linear", "exp", "mul"))
    graph = graph_of(sites, source=lambda k: f"model.py:{k % 3}")
    return OpGraph(graph.digraph, {f"blocks.{block}": "Block" for block in range(count)}), sites


def test_equal_layers_are_one_unit_for_each_line() -> None:
    graph, sites = blocks(4)
    assert units_of([graph], sites) == (sites[0::3], sites[1::3], sites[2::3])
    assert units_of([graph], sites[1:]) == (sites[1::3], sites[2::3], sites[3::3])


def test_an_unrolled_loop_is_one_unit_and_other_lines_are_others() -> None:
    sites = sites_of(20)
    assert units_of([graph_of(sites, source=lambda k: "model.py:7")], sites) == (sites,)
    assert units_of([graph_of(sites)], sites) == tuple((each,) for each in sites)


def test_a_site_that_runs_on_several_lines_belongs_to_the_first() -> None:
    one, two, three = sites_of(3)
    graph = graph_of([one, two, one, three], source=lambda k: ("a:1", "a:2", "a:2", "a:2")[k])
    assert units_of([graph], (one, two, three)) == ((one,), (two, three))


def test_units_span_the_graphs_of_all_batches() -> None:
    one, two, three = sites_of(3)
    graphs = [
        graph_of([one], source=lambda k: "a:1"),
        graph_of([one, two, three], source=lambda k: ("a:1", "a:1", "a:2")[k]),
    ]
    assert units_of(graphs, (one, two, three)) == ((one, two), (three,))


def test_a_unit_that_is_needed_in_one_layer_only_is_told_apart() -> None:
    graph, sites = blocks(4)
    culprit = sites[7]  # the exp of the third block
    found, tried = search(broken_by({culprit}), sites, graph=graph)
    assert found.sites == (culprit,)
    assert set(sites[1::3]) in tried  # all four as one
    assert found.alone == {culprit: BROKEN}


def test_a_unit_that_is_needed_in_every_layer_stays_whole() -> None:
    graph, sites = blocks(4)
    found, _ = search(broken_by(*({each} for each in sites[1::3])), sites, graph=graph)
    assert found.sites == sites[1::3]


@pytest.mark.parametrize(("length", "is_told_apart"), [(12, True), (13, False)])
def test_a_long_loop_is_not_told_apart(length: int, is_told_apart: bool) -> None:
    sites = sites_of(length)
    graph = graph_of(sites, source=lambda k: "model.py:7")
    found, _ = search(broken_by({sites[4]}), sites, graph=graph)
    assert found.sites == ((sites[4],) if is_told_apart else sites)


def test_no_step_is_run_twice() -> None:
    sites = sites_of(24)
    _, tried = search(broken_by({sites[3]}, {sites[9], sites[20]}, {sites[21]}), sites)
    assert len(tried) <= len(set(tried)) + sum(each == frozenset(sites) for each in tried)
