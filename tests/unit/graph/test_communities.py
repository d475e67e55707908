"""Parts of layers without a hierarchy, on graphs whose parts are plain to see."""

import subprocess
import sys

import networkx as nx
import pytest

from autoprec.graph.communities import communities, parts_of
from autoprec.graph.layers import layers_of
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from tests.op_graphs import node, op_graph


def cliques(number: int, size: int, module: str = "") -> tuple[nx.DiGraph, list[Site]]:
    """Return groups of calls that all read each other's results, one bridge between neighbors."""
    digraph: nx.DiGraph = nx.DiGraph()
    sites = []
    for index in range(number * size):
        name = f"{module}n{index}"
        call = node(name, "mul", module=module, index=index)
        digraph.add_node(name, call=call)
        sites.append(call.site)
        first = index - index % size
        digraph.add_edges_from((f"{module}n{other}", name) for other in range(first, index))
        if index == first and index > 0:
            digraph.add_edge(f"{module}n{index - 1}", name)
    return digraph, sites


def test_what_hangs_together_is_one_group() -> None:
    digraph, sites = cliques(3, 6)
    assert communities(OpGraph(digraph), sites, 10) == tuple(tuple(sites[k : k + 6]) for k in (0, 6, 12))


def test_a_group_that_is_small_enough_stays_whole_and_sites_that_are_not_asked_for_are_left_out() -> None:
    digraph, sites = cliques(2, 4)
    graph = OpGraph(digraph)
    assert communities(graph, sites, 8) == (tuple(sites),)
    assert communities(graph, sites[2:5], 8) == (tuple(sites[2:5]),)
    assert communities(graph, (), 8) == ()


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_no_group_is_too_large_and_each_site_is_in_one(most: int) -> None:
    digraph, sites = cliques(2, 7)
    found = communities(OpGraph(digraph), sites, most)
    assert max(map(len, found)) <= most
    assert sorted(site for group in found for site in group) == sorted(sites)


def test_calls_without_a_site_in_between_pass_results_on() -> None:
    calls = [node("a", "mul"), node("c", "add"), node("view", "view", index=None), node("b", "mul", index=1)]
    graph = op_graph(calls, [("a", "view"), ("view", "b")])
    first, other, second = (each.site for each in calls if each.site is not None)
    assert communities(graph, [first, other, second], 2) == ((first, second), (other,))


def test_only_layers_that_are_too_large_are_parted_and_repeated_ones_alike() -> None:
    first, own = cliques(2, 4, "b.0")
    second, other = cliques(2, 4, "b.1")
    digraph = nx.compose(first, second)
    last = node("last", "add", module="head")
    digraph.add_node("last", call=last)
    digraph.add_edge("b.1n7", "last")
    graph = OpGraph(digraph)
    parts = parts_of(graph, layers_of(graph), [*own, *other, last.site], 5)
    assert [parts[site] for site in own] == [parts[site] for site in other] == [0] * 4 + [1] * 4
    assert last.site not in parts
    assert parts_of(graph, layers_of(graph), [*own, *other], 8) == {}


def test_two_processes_find_the_same_parts() -> None:
    code = (
        "from tests.unit.graph.test_communities import cliques, communities, OpGraph\n"
        "digraph, sites = cliques(5, 5)\nprint(communities(OpGraph(digraph), sites, 4))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in (1, 2)
    }
    assert len(outputs) == 1
