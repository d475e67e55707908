"""What the spread of numerics classes and the layers owe on any graph."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autoprec.graph.layers import layers_of
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.propagate import paint
from tests.op_graphs import chain, node

CLASSES = ("allow", "infer", "deny", "clear")


@st.composite
def classed_graphs(draw: st.DrawFn) -> tuple[nx.DiGraph, dict[str, str]]:
    """Draw a directed acyclic graph of up to 12 nodes, most of them with a class."""
    size = draw(st.integers(0, 12))
    digraph = nx.DiGraph()
    digraph.add_nodes_from(str(index) for index in range(size))
    pairs = [(str(a), str(b)) for b in range(size) for a in range(b)]
    digraph.add_edges_from(pair for pair in pairs if draw(st.booleans()))
    drawn = {name: draw(st.sampled_from((*CLASSES, None))) for name in digraph}
    return digraph, {name: each for name, each in drawn.items() if each is not None}


def by_definition(digraph: nx.DiGraph, classes: dict[str, str]) -> dict[str, str]:
    """Return the colors by enumerating paths, as the comments of the source state them."""

    def linked(a: str, b: str, inside: object) -> bool:
        """Whether a path leads from `a` to `b` with all nodes between them `inside`."""
        return any(all(inside(name) for name in path[1:-1]) for path in nx.all_simple_paths(digraph, a, b))

    def kind(name: str) -> str:
        return classes.get(name, "")

    def gray(name: str) -> bool:
        return kind(name) in ("infer", "clear", "deny")

    # "on the denylist or on a forward path from a deny node to a deny/infer node through clear and infer nodes"
    ends = [name for name in classes if kind(name) in ("deny", "infer")]
    denied = {name for name in classes if kind(name) == "deny"}
    denied |= {b for a in list(denied) for b in ends if a != b and linked(a, b, gray)}
    for a in sorted(denied):
        for b in ends:
            for path in nx.all_simple_paths(digraph, a, b):
                if all(gray(name) for name in path):
                    denied |= set(path)
    allow = [name for name in classes if kind(name) == "allow"]
    low = set(allow)
    # "set nodes that are both downstream and upstream of allow ops to allow"
    for a in allow:
        for b in allow:
            for path in nx.all_simple_paths(digraph, a, b):
                if all(kind(name) in ("infer", "clear") and name not in denied for name in path[1:-1]):
                    low |= set(path)
    # "propagate allow from allow nodes through clear nodes"
    clear = {name for name in classes if kind(name) == "clear" and name not in denied}
    for component in nx.connected_components(digraph.to_undirected().subgraph(clear)):
        around = {other for name in component for other in nx.all_neighbors(digraph, name)}
        if (component | around) & low:
            low |= component
    return {name: "low" if name in low else "fp32" for name in classes}


@given(classed_graphs())
def test_the_fast_passes_equal_the_definition(graph: tuple[nx.DiGraph, dict[str, str]]) -> None:
    painted = paint(*graph)
    assert {name: each.color for name, each in painted.items()} == by_definition(*graph)


@given(classed_graphs())
def test_every_origin_is_a_deny_op_at_the_stated_distance(graph: tuple[nx.DiGraph, dict[str, str]]) -> None:
    digraph, classes = graph
    for name, each in paint(digraph, classes).items():
        if each.origin:
            assert each.color == "fp32"
            assert classes[each.origin] == "deny"
            assert classes[name] in ("deny", "infer", "clear")
            assert nx.has_path(digraph, each.origin, name)
            assert (each.distance == 0) == (each.origin == name) == (classes[name] == "deny")
            assert each.distance >= nx.shortest_path_length(digraph, each.origin, name)


PATHS = st.lists(
    st.lists(st.sampled_from(["blocks", "attn", "0", "1", "2", "conv1"]), min_size=0, max_size=4).map(".".join),
    min_size=1, max_size=12,
)  # fmt: skip


@given(PATHS, st.lists(st.sampled_from(["Linear", "GELU"]), min_size=12, max_size=12))
def test_layers_partition_the_sites_and_patterns_match_their_names(paths: list[str], classes: list[str]) -> None:
    nodes = [node(f"n{i}", "linear", module=path, call=paths[:i].count(path)) for i, path in enumerate(paths)]
    modules = dict(zip(paths, classes, strict=False))
    op_graph = OpGraph(chain(*nodes).digraph, modules)
    layers = layers_of(op_graph)
    assert [site for layer in layers for site in layer.sites] == list(op_graph.sites())
    for layer in layers:
        parts, stars = layer.name.split("."), layer.pattern.split(".")
        assert all(star == part or (star == "*" and part.isdigit()) for part, star in zip(parts, stars, strict=True))
    for pattern in {layer.pattern for layer in layers if "*" in layer.pattern}:
        members = [layer.name for layer in layers if layer.pattern == pattern]
        assert len(members) > 1
        assert len({modules[name] for name in members}) == 1
