"""Sites of a recording that FP8 kernels do not take."""

from autoprec.graph.float8 import float8_faults
from autoprec.graph.opgraph import OpNode
from autoprec.policy import Policy, Rule, resolve
from tests.op_graphs import chain, node, tensor

POLICY = Policy(
    name="p",
    rules=(
        Rule(sites="kept:linear", format="bf16"),
        Rule(sites="*:linear", format="fp8_e4m3"),
        Rule(sites="*", format="bf16"),
    ),
)


def _faults(*nodes: OpNode) -> tuple[str, ...]:
    graph = chain(*nodes)
    return float8_faults(resolve(POLICY, graph.sites()), graph)


def _linear(name: str, *shapes: tuple[int, ...], **facts: bool) -> OpNode:
    return node(name, "linear", module=name, inputs=tuple(tensor(*shape) for shape in shapes), **facts)


def test_sites_are_named_with_their_rule_and_shape_once() -> None:
    fits, head = _linear("fits", (3, 32), (16, 32)), _linear("head", (3, 32), (10, 32))
    again = node("again", "linear", module="head", call=1, inputs=head.inputs)
    text = 'rule 2 "*:linear": head:linear#0 cannot run in fp8_e4m3: (3, 32) by (10, 32): 10 not a multiple of 16'
    assert _faults(fits, head, again) == (text,)


def test_other_formats_and_calls_that_are_left_alone_may_have_any_shape() -> None:
    assert _faults(_linear("kept", (3, 5), (10, 5)), _linear("alone", (3, 5), (10, 5), left_alone=True)) == ()


def test_a_call_that_writes_to_a_given_tensor_is_none_for_kernels() -> None:
    (fault,) = _faults(_linear("writer", (3, 32), (16, 32), writes=True))
    assert fault.endswith("cannot run in fp8_e4m3: it writes its result to a given tensor")
