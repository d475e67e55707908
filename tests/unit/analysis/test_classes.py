import re

import pytest

from autoprec.analysis.classes import numerics_classes, reduction_length, static_marks
from autoprec.analysis.marks import Mark, ReasonCode
from autoprec.errors import FormatError
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from tests.op_graphs import chain, node, tensor


def verdicts(op_graph: OpGraph, fmt: str = "fp16") -> dict[str, str]:
    return {str(mark.site): mark.verdict for mark in static_marks(op_graph, (fmt,), "cpu")}


def only(op_graph: OpGraph, fmt: str = "fp16", device: str = "cpu") -> Mark:
    (mark,) = static_marks(op_graph, (fmt,), device)
    return mark


def test_deny_ops_and_what_they_contaminate_are_preferred_up_to_the_next_matmul() -> None:
    op_graph = chain(
        node("a", "linear"), node("b", "add"), node("c", "exp"), node("d", "mul"), node("e", "matmul"),
        node("f", "add", index=1),
    )  # fmt: skip
    assert verdicts(op_graph) == {
        ":linear#0": "free", ":add#0": "free", ":exp#0": "prefer", ":mul#0": "prefer", ":matmul#0": "free",
        ":add#1": "free",
    }  # fmt: skip


def test_a_contaminated_site_names_its_origin_and_how_far_it_is() -> None:
    op_graph = chain(node("a", "exp", module="attn"), node("b", "mul", module="attn"), node("c", "add", module="mlp"))
    marks = static_marks(op_graph, ("bf16",), "cpu")
    near, far = marks[1].reasons[0], marks[2].reasons[0]
    assert near.code is far.code is ReasonCode.CONTAMINATED
    assert near.evidence == {"origin": "attn:exp#0", "distance": 1}
    assert far.evidence == {"origin": "attn:exp#0", "distance": 2}
    assert near.detail == "reads the result of attn:exp#0 directly, which is FP32 by default"
    assert far.detail == "reads the result of attn:exp#0 2 ops later, which is FP32 by default"


def test_contamination_passes_through_ops_that_are_no_sites() -> None:
    op_graph = chain(node("a", "exp"), node("b", "view", index=None), node("c", "mul"))
    assert verdicts(op_graph)[":mul#0"] == "prefer"


def test_contamination_ends_at_integers() -> None:
    integers = (tensor(4, dtype="int64"),)
    op_graph = chain(node("a", "exp"), node("b", "sort", outputs=integers), node("c", "mul"))
    assert verdicts(op_graph) == {":exp#0": "prefer", ":sort#0": "free", ":mul#0": "free"}


def test_an_unknown_op_is_preferred_and_says_so() -> None:
    mark = only(chain(node("a", "frobnicate")))
    assert mark.verdict == "prefer"
    assert mark.reasons[0].code is ReasonCode.UNKNOWN_OP
    assert mark.reasons[0].detail == 'the catalog has no op "frobnicate" (32 values)'


def test_a_call_that_is_left_alone_is_free_and_contaminates_nothing() -> None:
    marks = static_marks(chain(node("a", "exp", left_alone=True), node("b", "mul")), ("fp16",), "cpu")
    assert [mark.verdict for mark in marks] == ["free", "free"]
    assert marks[0].reasons[0].code is ReasonCode.LEFT_ALONE


def test_a_call_that_writes_to_an_argument_is_free_and_passes_a_spread_on() -> None:
    marks = static_marks(chain(node("a", "exp"), node("b", "relu", writes=True), node("c", "mul")), ("fp16",), "cpu")
    assert [mark.verdict for mark in marks] == ["prefer", "free", "prefer"]
    assert "computes in that argument's format" in marks[1].reasons[0].detail


def test_a_site_of_several_calls_takes_the_strongest_verdict() -> None:
    op_graph = chain(node("a", "mul"), node("b", "exp"), node("c", "mul", call=1))
    assert verdicts(op_graph) == {":mul#0": "prefer", ":exp#0": "prefer"}


def test_marks_come_site_by_site_then_format_by_format() -> None:
    marks = static_marks(chain(node("a", "linear"), node("b", "exp")), ("fp16", "bf16"), "cpu")
    assert [(mark.site, mark.format) for mark in marks] == [
        (Site("", op, 0), fmt) for op in ("linear", "exp") for fmt in ("fp16", "bf16")
    ]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(FormatError, match="fp17"):
        static_marks(chain(node("a", "exp")), ("fp17",), "cpu")


def test_evidence_says_what_autocast_does_on_the_device() -> None:
    op_graph = chain(node("a", "exp"))
    assert only(op_graph, device="cuda").reasons[0].evidence["autocast"] == "fp32"
    assert only(op_graph, device="cpu").reasons[0].evidence["autocast"] == "none"


# Numbers: log(65504) = 11.09, sqrt(65504) = 255.94, 65504**(1/3) = 40.31; 1000 lies in [512, 1024), where fp16 steps
# by 2**(9 - 10) and bf16 by 2**(9 - 7); 10 lies in [8, 16), where bf16 steps by 2**(3 - 7).
@pytest.mark.parametrize(
    ("op", "fmt", "constants", "sentence"),
    [
        ("exp", "fp16", (), "exp overflows fp16 above 11.1 (32 values)"),
        ("exp", "bf16", (), "an input near 10 is rounded by up to 0.03125, which exp turns into a factor (32 values)"),
        ("square", "fp16", (), "squares overflow fp16 above 255.9 (32 values)"),
        ("pow", "fp16", (3.0,), "x ** 3 overflows fp16 above 40.3 (32 values)"),
        ("pow", "fp16", (-0.5,), "pow of 32 values, with 11 significant bits in fp16"),
        ("pow", "bf16", (3.0,), "pow of 32 values, with 8 significant bits in bf16"),
        ("square", "bf16", (), "square of 32 values, with 8 significant bits in bf16"),
        ("cos", "fp16", (), "near an angle of 1000 fp16 steps by 0.5 rad (32 values)"),
        ("sin", "bf16", (), "near an angle of 1000 bf16 steps by 4 rad (32 values)"),
    ],
)
def test_sentences_about_pointwise_ops(op: str, fmt: str, constants: tuple[float, ...], sentence: str) -> None:
    assert only(chain(node("a", op, constants=constants)), fmt).reasons[0].detail == sentence


@pytest.mark.parametrize(
    ("op", "fmt", "sentence"),
    [
        ("sum", "fp16", "a sum of 4,096 values overflows fp16 once they average 16"),
        ("sum", "bf16", "makes one result of 4,096 values, with 8 significant bits in bf16"),
        ("mean", "fp16", "makes one result of 4,096 values, with 11 significant bits in fp16"),
        ("std", "fp16", "squares overflow fp16 above 255.9 (8,192 values)"),
    ],
)
def test_sentences_about_reductions_state_their_length(op: str, fmt: str, sentence: str) -> None:
    op_graph = chain(node("a", op, inputs=(tensor(2, 4096),), outputs=(tensor(2),)))
    assert only(op_graph, fmt).reasons[0].detail == sentence


def test_every_reason_has_a_number_in_it() -> None:
    ops = ("exp", "sum", "pow", "cos", "cross_entropy", "cumsum", "cdist", "frobnicate", "embedding_bag", "norm")
    for op in ops:
        for fmt in ("fp16", "bf16"):
            assert re.search(r"\d", only(chain(node("a", op)), fmt).reasons[0].detail)


def test_a_reduction_to_or_from_nothing_has_length_one() -> None:
    empty = (tensor(0, 4),)
    assert reduction_length(node("a", "sum", inputs=empty, outputs=(tensor(0),))) == 1
    assert reduction_length(node("a", "sum", inputs=(), outputs=())) == 1


def test_classes_leave_out_inputs_integers_and_calls_left_alone() -> None:
    op_graph = chain(
        node("x", kind="input"), node("a", "linear"), node("b", "exp", left_alone=True),
        node("c", "argmax", outputs=(tensor(4, dtype="int64"),)), node("d", "view", index=None),
    )  # fmt: skip
    assert numerics_classes(op_graph) == {"a": "allow", "d": "clear"}
