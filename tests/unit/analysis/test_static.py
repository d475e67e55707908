import torch
from torch import nn
from torch.nn import functional as F

from autoprec.analysis import inspect_static, static_analysis
from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.marks import ReasonCode
from autoprec.analysis.static import StaticAnalysis
from tests.op_graphs import chain, node
from tests.recorded import recorded

X = torch.linspace(-3, 3, 64).reshape(8, 8)


def analyzed(lines, *batch: torch.Tensor, formats: tuple[str, ...] = ("fp16", "bf16")) -> StaticAnalysis:
    recording = recorded(lines, *batch)
    return static_analysis(recording.op_graph, formats, "cpu", extremes_of(recording))


def test_a_site_has_one_mark_a_format_and_says_first_what_is_special_about_it() -> None:
    found = analyzed(lambda x: (4 * x).exp(), X)
    assert len({(mark.site, mark.format) for mark in found.marks}) == len(found.marks)
    (mark,) = [mark for mark in found.marks if mark.site.op == "exp" and mark.format == "fp16"]
    assert mark.verdict == "prefer"
    assert [reason.code for reason in mark.reasons] == [ReasonCode.EXP_OVERFLOWS, ReasonCode.DENY_OP]


def test_a_pattern_is_one_finding_however_many_calls_take_part() -> None:
    def lines(x: torch.Tensor) -> torch.Tensor:
        state = x[0]
        for _ in range(40):
            state = 0.99 * state + x[1]
        return state

    found = analyzed(lines, X, formats=("bf16",)).findings
    assert [(each.code, each.site, each.severity) for each in found] == [("long_recurrence", ":add#39", "note")]
    assert found[0].fix == (
        'keep it in FP32: {sites: ":add#39", format: fp32}; or keep the state in FP32 and cast what leaves it'
    )


def test_only_what_is_proved_is_an_error() -> None:
    ones = torch.ones(300)
    found = analyzed(lambda x: (torch.arange(1000.0)[:, None] * ones[None]).sin(), X).findings
    assert [(each.code, each.severity) for each in found] == [
        ("phase_lost", "error"),
        ("phase_lost", "note"),
        ("bf16_coarser_phase_lost", "note"),
    ]
    assert "in steps of 4 rad in bf16" in found[0].message
    refused = analyzed(lambda x: x.masked_fill(x > 0, -1e9).softmax(-1), X).findings
    assert [(each.code, each.severity) for each in refused] == [("constant_overflows", "error")]


def test_bf16_is_called_worse_only_for_faults_of_precision_and_beside_fp16() -> None:
    def coarser(*formats: str, lines=lambda x: torch.ones(3000).cumsum(0)) -> list[str]:
        return [each.code for each in analyzed(lines, X, formats=formats).findings if each.code.startswith("bf16_")]

    assert coarser("fp16", "bf16") == ["bf16_coarser_running_sum"]
    assert coarser("bf16") == []
    assert coarser("fp16", "bf16", lines=lambda x: (4 * x).exp()) == []


def test_a_fused_norm_says_that_it_needs_nothing() -> None:
    found = analyzed(lambda x: F.layer_norm(x, (8,)), X)
    assert found.findings == ()
    for mark in found.marks:
        if mark.site.op == "layer_norm":
            assert mark.verdict == "free"
            (reason,) = mark.reasons
            assert reason.code is ReasonCode.FUSED_NORM
            assert "one kernel, which squares and sums in FP32 inside" in reason.detail


def test_a_norm_whose_backward_does_harm_is_not_praised() -> None:
    rows = torch.zeros(2000, 4)
    found = analyzed(lambda x: F.layer_norm(x, (4,)), rows)
    by_format = {mark.format: mark for mark in found.marks if mark.site.op == "layer_norm"}
    assert [reason.code for reason in by_format["bf16"].reasons] == [ReasonCode.NORM_BACKWARD]
    assert [reason.code for reason in by_format["fp16"].reasons] == [ReasonCode.FUSED_NORM]


def test_healthy_code_is_quiet() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def lines(x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x + attention(x, x, x, need_weights=False)[0], (8,))
        return F.cross_entropy(F.gelu(y).flatten(0, 1), torch.zeros(64, dtype=torch.long))

    assert analyzed(lines, X[None].expand(8, 8, 8).contiguous()).findings == ()


def test_a_graph_without_arguments_is_judged_by_its_classes() -> None:
    found = static_analysis(chain(node("a", "softmax"), node("b", "exp"), node("c", "mystery")), ("fp16",), "cpu")
    assert [mark.verdict for mark in found.marks] == ["free", "prefer", "prefer"]
    assert [finding.code for finding in found.findings] == ["unknown_op"]


def test_an_inspection_that_runs_nothing_says_so() -> None:
    recording = recorded(lambda x: x.softmax(-1).log(), X)
    found = inspect_static(recording, ("fp16",), "cpu")
    assert (found.replay_matches, found.gradients, found.storage, found.advice) == (None, None, None, ())
    assert [finding.code for finding in found.findings] == ["softmax_then_log", "log_near_zero"]
