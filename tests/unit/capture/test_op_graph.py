import torch
from torch.nn import functional as F

from autoprec.graph.opgraph import OpNode, Ref
from tests.recorded import recorded

X = torch.ones(2, 3)


def call(lines, op: str) -> OpNode:
    (node,) = [node for node in recorded(lines, X).op_graph if node.op == op]
    return node


def test_arguments_are_kept_with_names_of_nodes_for_tensors() -> None:
    node = call(lambda x: x.softmax(dim=-1, dtype=torch.float64), "softmax")
    assert node.args == (Ref("batch_0"),)
    assert node.kwargs == {"dim": -1, "dtype": "float64"}
    assert call(lambda x: torch.cat([x, x], 1), "cat").args == ((Ref("batch_0"), Ref("batch_0")), 1)
    assert call(lambda x: x[:, None, 1:], "getitem").args == (
        Ref("batch_0"),
        (slice(None), None, slice(1, None, None)),
    )


def test_reflected_operands_come_in_the_order_of_the_op() -> None:
    assert call(lambda x: 1 - x, "sub").args == (1, Ref("batch_0"))
    assert call(lambda x: torch.rsub(x, 1), "sub").args == (1, Ref("batch_0"))
    assert call(lambda x: 2**x, "pow").args == (2, Ref("batch_0"))
    assert call(lambda x: 1 / x, "div").args == (1, Ref("batch_0"))
    assert call(lambda x: x - 1, "sub").args == (Ref("batch_0"), 1)
    assert call(lambda x: x.round(), "round").args == (Ref("batch_0"),)


def test_a_property_is_read_by_its_name() -> None:
    assert call(lambda x: x.T, "get").args == (Ref("batch_0"), "T")


def test_what_is_opaque_has_no_arguments() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    assert call(lambda x: Twice.apply(x), "Twice").args == ()


def test_arguments_change_no_fingerprint() -> None:
    one, other = (recorded(lambda x, p=p: F.dropout(x, p), X).op_graph for p in (0.1, 0.2))
    assert one.fingerprint() == other.fingerprint()


def test_the_calls_of_a_site_are_found_without_a_search() -> None:
    graph = recorded(lambda x: (x.exp(), x.exp()), X).op_graph
    first, second = [node for node in graph.calls() if node.op == "exp"]
    assert first.site is not None
    assert graph.calls_of(first.site) == (first,)
    assert second.site in graph.sites()
    assert graph["exp_1"] is second
