import inspect
from collections import Counter
from collections.abc import Iterator

import networkx as nx
import pytest

from autoprec.graph.propagate import Paint, paint

FP32, LOW = Paint(color="fp32"), Paint(color="low")


def line(*classes: str) -> tuple[nx.DiGraph, dict[str, str]]:
    """Return a chain of ops `0 -> 1 -> ...` of these classes; `-` stands for a node without a class."""
    names = [str(index) for index in range(len(classes))]
    digraph = nx.DiGraph()
    digraph.add_nodes_from(names)
    nx.add_path(digraph, names)
    return digraph, {name: each for name, each in zip(names, classes, strict=True) if each != "-"}


def deny(origin: str, distance: int) -> Paint:
    return Paint(color="fp32", origin=origin, distance=distance)


def test_the_example_of_the_source() -> None:
    painted = paint(*line("deny", "infer", "clear", "infer", "clear", "allow", "infer"))
    assert list(painted.values()) == [deny("0", 0), deny("0", 1), deny("0", 2), deny("0", 3), LOW, LOW, FP32]


@pytest.mark.parametrize(
    ("classes", "colors"),
    [
        (["allow", "infer", "clear", "infer", "allow"], "low low low low low"),
        (["allow", "infer", "infer"], "low fp32 fp32"),
        (["infer", "allow"], "fp32 low"),
        (["clear", "clear", "allow", "clear"], "low low low low"),
        (["clear", "infer", "clear"], "fp32 fp32 fp32"),
        (["allow", "deny", "allow"], "low fp32 low"),
        (["allow", "infer", "deny", "infer", "allow"], "low fp32 fp32 fp32 low"),
        (["deny", "clear", "allow"], "fp32 low low"),
        (["deny", "clear"], "fp32 fp32"),
        (["deny", "clear", "deny"], "fp32 fp32 fp32"),
        (["allow", "-", "infer", "allow"], "low fp32 low"),
        ([], ""),
    ],
    ids=" ".join,
)
def test_a_chain_of_ops(classes: list[str], colors: str) -> None:
    assert " ".join(each.color for each in paint(*line(*classes)).values()) == colors


def test_a_node_without_a_class_stops_contamination_and_has_no_color() -> None:
    painted = paint(*line("deny", "-", "infer"))
    assert painted == {"0": deny("0", 0), "2": FP32}


def test_a_deny_op_downstream_of_another_names_itself() -> None:
    assert paint(*line("deny", "infer", "deny", "infer"))["3"] == deny("2", 1)


def test_the_nearest_deny_op_is_named_and_the_first_of_two_equally_near_ones() -> None:
    digraph = nx.DiGraph([("far", "step"), ("step", "join"), ("first", "join"), ("second", "join")])
    classes = dict.fromkeys(["far", "first", "second"], "deny") | dict.fromkeys(["step", "join"], "infer")
    assert paint(digraph, classes)["join"] == deny("first", 1)


def test_a_clear_op_that_feeds_both_an_infer_and_an_allow_op_is_contaminated() -> None:
    digraph = nx.DiGraph([("exp", "view"), ("view", "matmul"), ("view", "add")])
    painted = paint(digraph, {"exp": "deny", "view": "clear", "matmul": "allow", "add": "infer"})
    assert [painted[name].color for name in ("exp", "view", "matmul", "add")] == ["fp32", "fp32", "low", "fp32"]


def test_colors_come_in_the_order_of_the_graph() -> None:
    digraph, classes = line("clear", "deny", "infer")
    assert list(paint(digraph, dict(reversed(classes.items())))) == ["0", "1", "2"]


class CountingGraph(nx.DiGraph):
    """Counts how many neighbors were handed out."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.visits: Counter[str] = Counter()

    def successors(self, name: str) -> Iterator[str]:
        return self._count("edges", super().successors(name))

    def predecessors(self, name: str) -> Iterator[str]:
        return self._count("edges", super().predecessors(name))

    def _count(self, what: str, names: Iterator[str]) -> Iterator[str]:
        for name in names:
            self.visits[what] += 1
            yield name


@pytest.mark.parametrize("num_ops", [2_000, 20_000])
def test_the_work_is_linear_in_nodes_and_edges(num_ops: int) -> None:
    cycle = ("clear", "deny", "infer", "allow", "infer", "clear", "infer", "allow")
    digraph, classes = CountingGraph(), {}
    for number in range(num_ops):
        classes[str(number)] = cycle[number % 8]
        digraph.add_edges_from((str(number - back), str(number)) for back in (1, 2, 5, 100) if number >= back)
    painted = paint(digraph, classes)
    assert len(painted) == num_ops
    # Each edge is looked at once a pass at most: passes 2 (twice), 3 (twice) and 5 (from both of its ends).
    assert digraph.visits["edges"] <= 6 * digraph.number_of_edges()


def test_it_does_not_recurse() -> None:
    assert len(paint(*line("deny", *["infer"] * 50_000))) == 50_001


def test_the_source_is_cited() -> None:
    assert "auto_mixed_precision.cc" in (inspect.getmodule(paint).__doc__ or "")
