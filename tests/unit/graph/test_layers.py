from autoprec.graph.layers import Layer, layers_of
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import LOSS_MODULE, Site
from tests.op_graphs import chain, node


def graph(*calls: tuple[str, str], modules: dict[str, str]) -> OpGraph:
    """Return a chain of `(module, op)` calls, with the index counted for each module."""
    nodes, seen = [], []
    for module, op in calls:
        nodes.append(node(f"n{len(nodes)}", op, module=module, index=seen.count((module, op))))
        seen.append((module, op))
    return OpGraph(chain(*nodes).digraph, modules)


def patterns(op_graph: OpGraph) -> dict[str, str]:
    return {layer.name: layer.pattern for layer in layers_of(op_graph)}


def test_a_layer_is_the_sites_a_module_calls_itself_in_order_of_first_execution() -> None:
    op_graph = graph(
        ("blocks.0", "add"), ("blocks.0.attn", "softmax"), ("blocks.0", "add"), ("", "mean"),
        (LOSS_MODULE, "cross_entropy"), modules={"": "Net", "blocks.0": "Block", "blocks.0.attn": "Attention"},
    )  # fmt: skip
    assert layers_of(op_graph) == (
        Layer(name="blocks.0", pattern="blocks.0", sites=(Site("blocks.0", "add", 0), Site("blocks.0", "add", 1))),
        Layer(name="blocks.0.attn", pattern="blocks.0.attn", sites=(Site("blocks.0.attn", "softmax", 0),)),
        Layer(name="", pattern="", sites=(Site("", "mean", 0),)),
        Layer(name=LOSS_MODULE, pattern=LOSS_MODULE, sites=(Site(LOSS_MODULE, "cross_entropy", 0),)),
    )


def test_a_site_called_twice_is_listed_once() -> None:
    op_graph = chain(node("a", "add"), node("b", "add", call=1))
    assert [layer.sites for layer in layers_of(op_graph)] == [(Site("", "add", 0),)]


def test_repeated_modules_share_a_starred_pattern() -> None:
    modules = {f"h.{i}.{part}": kind for i in range(2) for part, kind in (("attn", "Attention"), ("mlp", "MLP"))}
    op_graph = graph(*((name, "linear") for name in modules), modules=modules)
    assert patterns(op_graph) == {name: f"h.*.{name.rsplit('.', 1)[1]}" for name in modules}


def test_the_steps_of_a_sequential_keep_their_numbers_but_blocks_of_it_do_not() -> None:
    modules = {f"blocks.{i}.{step}": kind for i in range(3) for step, kind in enumerate(("Linear", "GELU", "Linear"))}
    op_graph = graph(*((name, "linear") for name in modules), modules=modules)
    assert set(patterns(op_graph).values()) == {"blocks.*.0", "blocks.*.1", "blocks.*.2"}


def test_nested_repetition_gets_several_stars() -> None:
    modules = {f"stages.{i}.blocks.{j}": "Block" for i in range(2) for j in range(2)}
    op_graph = graph(*((name, "add") for name in modules), modules=modules)
    assert set(patterns(op_graph).values()) == {"stages.*.blocks.*"}


def test_a_module_without_sites_still_tells_siblings_apart() -> None:
    modules = {"mlp.0": "Linear", "mlp.1": "Dropout", "mlp.2": "Linear"}
    op_graph = graph(("mlp.0", "linear"), ("mlp.2", "linear"), modules=modules)
    assert patterns(op_graph) == {"mlp.0": "mlp.0", "mlp.2": "mlp.2"}


def test_a_number_inside_a_name_is_no_counter() -> None:
    op_graph = graph(("conv1", "conv2d"), ("conv2", "conv2d"), modules={"conv1": "Conv2d", "conv2": "Conv2d"})
    assert patterns(op_graph) == {"conv1": "conv1", "conv2": "conv2"}


def test_a_graph_without_sites_has_no_layers() -> None:
    assert layers_of(chain(node("x", kind="input"))) == ()
