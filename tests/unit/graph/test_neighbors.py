import networkx as nx

from autoprec.graph.neighbors import named_neighbor, readers_of, reads_of
from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.site import Site

ADD, EXP, MUL = Site("", "add", 0), Site("", "exp", 0), Site("m", "mul", 0)


def graph() -> OpGraph:
    """Return x -> view -> transpose -> add(., w) -> {exp, view -> mul}, exp -> loss; mul is called twice."""
    nodes = [
        OpNode(name="x", kind="input"),
        OpNode(name="w", kind="parameter", target="lin.weight"),
        OpNode(name="view", kind="op", op="view"),
        OpNode(name="transpose", kind="op", op="transpose"),
        OpNode(name="add", kind="op", op="add", site=ADD),
        OpNode(name="exp", kind="op", op="exp", site=EXP),
        OpNode(name="view_1", kind="op", op="view"),
        OpNode(name="mul", kind="op", op="mul", site=MUL),
        OpNode(name="mul_1", kind="op", op="mul", site=MUL, call=1),
        OpNode(name="unread", kind="op", op="view"),
        OpNode(name="output", kind="output"),
    ]
    digraph: nx.DiGraph[str] = nx.DiGraph()
    for node in nodes:
        digraph.add_node(node.name, call=node)
    digraph.add_edges_from(
        [
            ("x", "view"), ("view", "transpose"), ("transpose", "add"), ("w", "add"), ("add", "exp"), ("add", "view_1"),
            ("view_1", "mul"), ("w", "mul"), ("exp", "mul_1"), ("exp", "output"), ("mul", "unread"),
        ]
    )  # fmt: skip
    return OpGraph(digraph)


def told(neighbors) -> list[tuple[str, tuple[str, ...]]]:
    return [(str(each), each.via) for each in neighbors]


def test_what_a_site_reads_is_found_past_views():
    assert told(reads_of(graph(), ADD)) == [("input x", ("transpose", "view")), ("parameter lin.weight", ())]


def test_who_reads_a_site_is_found_past_views():
    assert told(readers_of(graph(), ADD)) == [(":exp#0", ()), ("m:mul#0", ("view",))]
    assert told(readers_of(graph(), EXP)) == [("m:mul#0", ()), ("the loss", ())]


def test_all_calls_of_a_site_count():
    assert told(reads_of(graph(), MUL)) == [(":add#0", ("view",)), ("parameter lin.weight", ()), (":exp#0", ())]


def test_a_view_that_nobody_reads_is_told_itself():
    assert told(readers_of(graph(), MUL)) == [("op unread", ())]


def test_a_tensor_is_named_for_what_it_is_a_view_of():
    assert told([named_neighbor(graph(), name) for name in ("transpose", "w", "add")]) == [
        ("input x", ("transpose", "view")), ("parameter lin.weight", ()), (":add#0", ()),
    ]  # fmt: skip
