"""Which sites read a parameter: directly, through calls without a site, and not through memory alone."""

from autoprec.graph.site import Site
from autoprec.graph.uses import uses_of
from tests.op_graphs import node, op_graph, tensor


def parameter(name: str):
    from dataclasses import replace

    return replace(node(name, kind="parameter", index=None), target=name)


def test_readers_are_found_through_calls_without_a_site_in_the_order_they_ran():
    graph = op_graph(
        [
            parameter("weight"),
            parameter("idle"),
            node("mean", "mean", module="a"),
            node("turned", "t", index=None),
            node("product", "mm", module="b"),
            node("after", "relu", module="b"),
        ],
        [("weight", "turned"), ("turned", "product"), ("weight", "mean"), ("product", "after")],
    )
    uses = uses_of(graph)
    assert uses.parameters == {"weight": (Site("a", "mean", 0), Site("b", "mm", 0)), "idle": ()}
    assert uses.sites == (Site("a", "mean", 0), Site("b", "mm", 0), Site("b", "relu", 0))
    assert uses.as_stored == frozenset()


def test_a_shape_or_written_memory_is_no_reading():
    graph = op_graph(
        [
            parameter("weight"),
            node("shape", "size", index=None, outputs=(tensor(2, dtype="int64"),)),
            node("ones", "mul", module="a"),
            node("later", "add", module="a"),
        ],
        [("weight", "shape"), ("shape", "ones")],
    )
    graph.digraph.add_edge("weight", "later", memory=True)
    assert uses_of(graph).parameters == {"weight": ()}


def test_a_site_is_as_stored_only_if_no_call_of_it_is_cast():
    graph = op_graph(
        [
            node("one", "add", module="a", left_alone=True),
            node("two", "add", module="a", call=1),
            node("three", "mul", module="a", writes=True),
        ]
    )
    assert uses_of(graph).as_stored == {Site("a", "mul", 0)}
