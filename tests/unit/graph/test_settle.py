import math

import pytest

from autoprec.graph import settle
from autoprec.graph.cut import CastCost, OpCost, cut_problem
from autoprec.graph.settle import settled
from tests.op_graphs import chain, node, op_graph

NAMES = "abc"
NODES = [node(name, "relu", index=index) for index, name in enumerate(NAMES)]


def problem_of(graph):
    casts = {each.name: CastCost(down_s=1.0, up_s=1.0) for each in graph}
    return cut_problem(graph, dict.fromkeys(NAMES, OpCost(fp32_s=1.0, low_s=1.0)), casts)


@pytest.mark.parametrize(
    ("dearer", "known"),
    [
        ({0: -1.5, 1: -1.5, 2: -0.5}, {}),  # each may cost up to two casts, the last one up to one
        ({0: -2.5, 1: -1.5, 2: -0.5}, {0: True, 1: True, 2: True}),  # one after the other
        ({0: math.inf, 1: -1.5, 2: -1.5}, {0: False, 2: True, 1: True}),
        ({0: 0.0, 1: 1.5, 2: 1.5}, {0: False, 1: False, 2: False}),
    ],
)
def test_a_unit_is_settled_once_its_gain_outweighs_what_is_open(dearer, known):
    assert settled(problem_of(chain(node("x", kind="input"), *NODES)), bytes(3), dearer) == known


def test_units_that_are_not_open_have_the_precision_of_their_codes():
    problem = problem_of(chain(node("x", kind="input"), *NODES))
    assert settled(problem, bytes([0, 1, 1]), {0: -0.5}) == {0: True}
    assert settled(problem, bytes([0, 1, 0]), {2: -0.5}) == {2: True}
    assert settled(problem, bytes([0, 0, 0]), {2: -0.5}) == {2: False}


def test_a_tensor_with_many_readers_settles_nobody_by_what_others_are(monkeypatch):
    graph = op_graph([node("x", kind="input"), *NODES], [("x", name) for name in NAMES])
    dearer = {0: -1.5, 1: 0.5, 2: 0.5}
    assert settled(problem_of(graph), bytes(3), dearer) == {0: True, 1: False, 2: False}
    dearer = {0: -1.5, 1: -0.5, 2: -0.5}
    assert settled(problem_of(graph), bytes(3), dearer) == {0: True, 1: True, 2: True}
    monkeypatch.setattr(settle, "_MOST_READERS", 2)
    assert settled(problem_of(graph), bytes(3), dearer) == {0: True}
