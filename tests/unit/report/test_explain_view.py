import math

import pytest
import torch
from rich.console import Console

from autoprec.analysis import (
    Finding,
    Inspection,
    LossScaleAdvice,
    Mark,
    MeasuredNumerics,
    Reason,
    ReasonCode,
    SiteTensor,
    Storage,
    tensor_numerics,
)  # fmt: skip
from autoprec.analysis.loss_scale import GradientHistograms
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from autoprec.report import explain_text
from autoprec.report.explain_json import explain_json
from autoprec.report.explain_text import render_explanation
from autoprec.report.explain_view import ExplainView, explain_view
from tests.op_graphs import node, op_graph, tensor

FORMATS = ("fp16", "bf16")
MID = Site("mid", "softmax", 0)


def graph(num_readers: int = 1, **mid) -> OpGraph:
    readers = [node(f"read{index}", "add", index=index) for index in range(num_readers)]
    nodes = [node("first", "linear", module="in"), node("view", "view", index=None)]
    nodes += [node("mid", "softmax", module="mid", **mid), *readers]
    return op_graph(
        nodes, [("first", "view"), ("view", "mid"), *(("mid", reader.name) for reader in readers)]
    )  # fmt: skip


def measured(role, values, index=0, sources=()) -> SiteTensor:
    return SiteTensor(
        role=role, index=index, sources=sources, numerics=tensor_numerics(torch.tensor(values), FORMATS)
    )  # fmt: skip


def inspection(*tensors: SiteTensor, op_graph: OpGraph | None = None, needed: bool = False) -> Inspection:
    reasons = tuple(Reason(code=ReasonCode.DENY_OP, detail=detail) for detail in ("first reason", "second reason"))
    return Inspection(
        formats=FORMATS, op_graph=op_graph or graph(), num_batches=2, replay_matches=True, fp32_error=0.0, diagnoses=(),
        marks=(
            Mark(site=MID, format="fp16", verdict="must", reasons=reasons),
            Mark(site=MID, format="bf16", verdict="free"),
        ),
        gradients=GradientHistograms(parameters={}, activations={}),
        advice=(
            LossScaleAdvice(
                format="fp16", needed=needed, initial=1024.0, flush_frac=0, subnormal_frac=0, scaled_flush_frac=0,
                max_abs=1.0,
            ),
        ),
        storage=Storage(
            optimizer="SGD", measured=False, lr=1.0, eps=None, second_moment_decay=None, parameters=(), buffers=()
        ),
        findings=(Finding(code="x", severity="note", site="mid:softmax#0", message="m", fix="f"),),
        numerics=MeasuredNumerics(formats=FORMATS, num_batches=2, sites={MID: tensors}),
    )  # fmt: skip


def view(*tensors: SiteTensor, **settings) -> ExplainView:
    return explain_view(
        inspection(*tensors, **settings), MID, workload="net", device="cpu (test)", code="x.softmax(-1)", width=100
    )  # fmt: skip


def table(shown: ExplainView, picture: int = 0) -> dict[str, dict[str, str]]:
    head, *rows = shown.pictures[picture].table
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_site_is_told_with_its_source_shapes_and_constants():
    shown = view(op_graph=graph(inputs=(tensor(2, 3), tensor()), constants=(0.5, 0.5)))
    facts = dict(shown.facts)
    assert shown.headline == "mid:softmax#0 in net on cpu (test)"
    assert facts["source"] == "model.py:3   x.softmax(-1)"
    assert facts["op"] == "softmax (softmax); by its class alone: low if what it reads is"
    assert facts["tensors"] == "float32 2x3, float32 scalar -> float32 4x8"
    assert (facts["constants"], facts["measured"]) == ("0.5", "over 2 training steps in FP32")
    assert "calls" not in facts


def test_every_reason_of_every_format_is_told():
    told = [(row.format, row.verdict, row.reasons) for row in view().verdicts]
    assert told == [("fp16", "must", ("first reason", "second reason")), ("bf16", "free", ())]


def test_neighbors_are_told_with_what_lies_between_and_the_rest_is_counted():
    assert view().neighbors == (
        ("reads", "in:linear#0 (by way of view)", "model.py:5"), ("read by", ":add#0", "model.py:5"),
    )  # fmt: skip
    many = view(op_graph=graph(num_readers=20)).neighbors
    assert many[-1] == ("", "and 12 more", "")
    assert len(many) == 1 + 8 + 1
    assert view(op_graph=graph(num_readers=0)).neighbors[-1] == ("read by", "nothing", "")


def test_a_picture_tells_what_each_format_does():
    shown = view(
        measured("input", [2.0**-30, 2.0**-20, 1.0, 1e5, 0.0, 0.0, 0.0, math.nan, -math.inf], sources=("view",))
    )
    (picture,) = shown.pictures
    assert (picture.title, picture.comment) == ("input", "in:linear#0 (by way of view)")
    assert picture.facts == (
        "9 elements, 33.3 % exactly 0, 1 NaN, 1 infinite, from 0 to 1e+05, tallest bar 25 % in 2^-30 to 2^-29"
    )
    assert table(shown)["fp16"] == {
        "headroom": "2^-0.6", "overflow": "25 %", "become 0": "25 %", "lose digits": "25 %",
        "rounding error": "<0.001 %",
    }  # fmt: skip
    assert table(shown)["bf16"]["overflow"] == "0"
    assert len(picture.heights) == shown.axis.num_columns


def test_gradients_are_told_under_the_loss_scale_that_they_need():
    gradient = measured("gradient", [2.0**-30, 1.0])
    assert "fp16 x 2^10" not in table(view(gradient))
    shown = table(view(gradient, needed=True))
    assert (shown["fp16"]["become 0"], shown["fp16 x 2^10"]["become 0"]) == ("50 %", "0")
    assert shown["fp16 x 2^10"]["lose digits"] == "50 %"
    assert (shown["fp16"]["headroom"], shown["fp16 x 2^10"]["headroom"]) == ("2^16.0", "2^6.0")
    assert "fp16 x 2^10" not in table(view(measured("output", [1.0]), needed=True))


def test_tensors_of_one_role_are_numbered_and_share_an_axis():
    shown = view(measured("input", [1.0]), measured("input", [2.0**-40], index=1), measured("output", [0.0]))
    assert [each.title for each in shown.pictures] == ["input 0", "input 1", "output"]
    assert {len(each.heights) for each in shown.pictures} == {shown.axis.num_columns}
    assert not any(shown.pictures[2].heights)


@pytest.mark.parametrize(
    ("values", "percent"),
    [([1e-9] * 3 + [1.0], "75 %"), ([1e-9] * 1 + [1.0] * 2047, "0.049 %"), ([1.0], "0"),
     ([1e-9] * 4095 + [1.0], ">99.9 %"), ([1e-9] + [1.0] * 200_000, "<0.001 %")],
)  # fmt: skip
def test_what_is_not_nothing_never_reads_as_nothing_nor_what_is_not_all_as_all(values, percent):
    assert table(view(measured("output", values)))["fp16"]["become 0"] == percent


def page(shown: ExplainView, width: int = 80, *, has_blocks: bool = True) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render_explanation(shown, has_blocks=has_blocks))
    return capture.get()


def test_the_page_marks_zones_and_bars():
    out = page(view(measured("output", [2.0**-30, 1.0, 1.0])))
    assert explain_text._LEGEND in out
    lines = out.splitlines()
    (zones,) = [line for line in lines if "~" in line and line.startswith("  fp16")]
    bottom = lines[lines.index(zones) - 1]
    marks = {zones[column]: char for column, char in enumerate(bottom) if char != " "}
    assert marks == {"0": "█", "-": "█"}
    assert (zones.count("0"), zones.count("~"), zones.count("X")) == (7, 11, 3)


def test_a_terminal_without_blocks_gets_ascii():
    assert len(explain_text._ASCII_BLOCKS) == len(explain_text._BLOCKS)
    assert page(view(measured("output", [2.0**-30, 1.0, 1.0])), has_blocks=False).isascii()


def test_a_site_of_integers_says_so():
    assert "none: it computes on integers alone" in page(view())


def test_a_tensor_of_zeros_has_no_picture():
    out = page(view(measured("output", [0.0, 0.0])))
    assert "2 elements, 100 % exactly 0, from 0 to 0" in out
    assert "fp16  0" not in out


def test_json_names_neighbors_calls_and_findings():
    found = explain_json(
        inspection(op_graph=graph(constants=(math.inf, 2))), MID, workload="net", device={"kind": "cpu"}
    )  # fmt: skip
    assert found["reads"] == [{"kind": "site", "name": "in:linear#0", "via": ["view"], "source": "model.py:5"}]
    assert found["calls"][0]["constants"] == ["inf", 2]
    assert [each["message"] for each in found["findings"]] == ["m"]
    assert found["site"]["numerics"] == {"inputs": [], "outputs": [], "gradients": []}
