from dataclasses import replace

import pytest

from autoprec.graph.opgraph import Ref
from autoprec.graph.reads import Read, choices_of, reads_of
from autoprec.graph.site import LOSS_MODULE, Site
from tests.op_graphs import chain, node, op_graph, tensor

X = node("x", kind="input")
A, B = node("a", "relu", index=0), node("b", "add", index=1)
OUT = node("out", kind="output", outputs=())


def read(tensors, producers, reader, *, leaves=False):
    sites = tuple(each.site for each in producers)
    return Read(tensor=tuple(tensors), producers=sites, reader=reader and reader.site, leaves=leaves)


def test_a_chain_reads_from_call_to_call_and_leaves_at_its_end():
    graph = chain(X, A, B, OUT)
    assert reads_of(graph) == (
        read("x", [], A),
        read("a", [A], B),
        read("b", [B], None, leaves=True),
    )


@pytest.mark.parametrize("op", ["view", "transpose", "getitem", "to"])
def test_a_view_is_read_in_the_format_of_what_it_looks_at(op):
    view = node("v", op, index=None)
    assert reads_of(chain(X, A, view, B))[1] == read(["v", "a"], [A], B)


def test_a_tensor_made_in_the_dtype_of_another_is_no_view_of_it():
    assert reads_of(chain(X, A, node("z", "zeros_like", index=None), B))[1] == read("z", [A], B)


def test_what_is_made_from_nothing_is_fp32():
    assert reads_of(chain(node("z", "zeros", index=None), A)) == (read("z", [], A),)


def test_float_reads_and_returns_fp32():
    made = node("f", "float", index=None)
    assert reads_of(chain(X, A, made, B))[1:] == (read("a", [A], None), read("f", [], B))


def test_integers_doubles_and_memory_are_no_reads():
    ids = node("ids", kind="input", outputs=(tensor(4, dtype="int64"),))
    double = node("d", kind="input", outputs=(tensor(4, dtype="float64"),))
    graph = op_graph([X, ids, double, A, B], [("x", "a"), ("ids", "a"), ("d", "a"), ("a", "b")])
    graph.digraph.edges["a", "b"]["memory"] = True
    assert reads_of(graph) == (read("x", [], A),)


def test_a_norm_reads_its_first_argument_alone():
    norm = node("n", "layer_norm")
    graph = op_graph([X, node("w", kind="parameter"), norm], [("x", "n"), ("w", "n")])
    assert reads_of(graph) == (read("x", [], norm),)


def test_a_call_that_writes_has_the_format_of_its_first_argument():
    writes = node("w", "add", index=2, writes=True)
    graph = op_graph([X, A, B, writes, OUT], [("x", "a"), ("x", "b"), ("a", "w"), ("b", "w"), ("w", "out")])
    assert reads_of(graph)[2:] == (read("w", [A], None, leaves=True),)


@pytest.mark.parametrize("op", ["mul", "meshgrid", "type_as"])
def test_a_call_that_is_left_alone_has_the_widest_of_what_it_is_given(op):
    kept = node("k", op, index=2 if op == "mul" else None, left_alone=op == "mul")
    edges = [("x", "a"), ("x", "b"), ("a", "k"), ("b", "k"), ("k", "out")]
    assert reads_of(op_graph([X, A, B, kept, OUT], edges))[2:] == (read("k", [A, B], None, leaves=True),)
    assert reads_of(op_graph([X, A, B, kept, OUT], [*edges, ("x", "k")]))[2:] == (read("k", [], None, leaves=True),)


def test_what_loss_code_reads_has_left_the_model_in_fp32():
    loss = node("l", "mse_loss", module=LOSS_MODULE)
    view = node("v", "view", index=None)
    assert reads_of(chain(X, A, view, loss, node("m", "mean", module=LOSS_MODULE)))[1:] == (
        read(["v", "a"], [A], None, leaves=True),
        read(["v", "a"], [], loss),
        read("l", [loss], node("m", "mean", module=LOSS_MODULE)),
    )


@pytest.mark.parametrize("kind", ["left_alone", "writes"])
def test_loss_code_that_is_left_alone_keeps_the_fp32_that_it_is_given(kind):
    kept = node("k", "mul", module=LOSS_MODULE, **{kind: True})
    loss = node("l", "mean", module=LOSS_MODULE)
    assert reads_of(chain(X, A, kept, loss))[1:] == (read("a", [A], None, leaves=True), read("k", [], loss))


def test_choices_are_the_sites_with_a_call_that_may_be_cast():
    again = node("a2", "relu", index=0, call=1)
    kept = node("k", "add", index=5, left_alone=True)
    double = node("d", "add", index=6, inputs=(tensor(2, dtype="float64"), tensor(2)))
    assert choices_of(op_graph([X, A, again, kept, double, B])) == {
        Site("", "relu", 0): (A, again),
        Site("", "add", 1): (B,),
    }


def test_an_argument_that_is_given_twice_is_read_and_cast_twice():
    square = replace(node("s", "mul"), args=(Ref("a"), (Ref("a"), 2.0)), kwargs={"out_of": {"b": Ref("x")}})
    graph = op_graph([X, A, square], [("x", "a"), ("a", "s"), ("x", "s")])
    assert reads_of(graph) == (read("x", [], A), read("a", [A], square), read("a", [A], square), read("x", [], square))
