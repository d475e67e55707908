"""Each pattern is found where it is, with its number, and not where it is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.marks import Mark, ReasonCode
from autoprec.analysis.patterns import PATTERNS, cure_of, explanations, pattern_marks
from autoprec.analysis.ranges import ranges_of
from autoprec.graph.opgraph import OpGraph
from tests.op_graphs import chain, node
from tests.recorded import recorded

X = torch.linspace(-3, 3, 64).reshape(8, 8)
LONG = torch.linspace(-3, 3, 6000)
MANY = torch.randn(40000, 4, generator=torch.Generator().manual_seed(0))


def marks_of(lines, *batch: torch.Tensor, known: bool = True, device: str = "cpu") -> tuple[Mark, ...]:
    recording = recorded(lines, *batch)
    ranges = ranges_of(recording.op_graph, extremes_of(recording) if known else {})
    return pattern_marks(recording.op_graph, ("fp16", "bf16"), ranges, device_kind=device)


def codes(marks: tuple[Mark, ...], fmt: str) -> dict[str, set[str]]:
    """Return the ops that each pattern flags."""
    found: dict[str, set[str]] = {}
    for mark in marks:
        if mark.format == fmt:
            found.setdefault(mark.reasons[0].code.value, set()).add(f"{mark.site.op}#{mark.site.index}")
    return found


def _local_variance(x: torch.Tensor) -> torch.Tensor:
    mean = F.avg_pool1d(x, 2)
    return F.avg_pool1d(x * x, 2) - mean * mean


def _recurrence(x: torch.Tensor) -> torch.Tensor:
    state = x[0]
    for _ in range(40):
        state = 0.99 * state + x[1]
    return state


STEPS = " ".join(f"mul#{i} add#{i}" for i in range(1, 40))

# code -> code that has it, its batch, the ops it flags in fp16, and in bf16
FOUND = {
    "softmax_then_log": (lambda x: (x.softmax(-1).view(-1) + 1e-4).log(), X, "softmax#0 add#0 log#0", "same"),
    "sigmoid_then_log": (
        lambda x: torch.log1p(-x.sigmoid().clamp(max=0.9)), X, "sigmoid#0 clamp#0 neg#0 log1p#0", "same",
    ),
    "one_minus_probability": (lambda x: (1 - x.sigmoid()).pow(2), X, "sigmoid#0 sub#0 pow#0", "same"),
    "log_sum_exp": (lambda x: (x.exp() * 2).sum(-1).log(), X, "exp#0 mul#0 sum#0 log#0", "same"),
    "log_of_uniform": (lambda x: (torch.rand(8) + 1e-6).log(), X, "add#0 log#0", "same"),
    "log_near_zero": (lambda x: (x.relu() + 1e-9).log(), X, "relu#0 add#0 log#0", ""),
    "divisor_near_zero": (lambda x: x / (x - x.mean()).relu().add(1e-9), X, "relu#0 add#0 div#0", ""),
    "root_near_zero": (lambda x: x.square().sum(-1).sqrt(), X, "sum#0 sqrt#0", ""),
    "exp_overflows": (lambda x: (4 * x).exp(), X, "exp#0", ""),
    "exp_of_difference": (
        lambda x: (x.cumsum(-1)[:, None] - x.cumsum(-1)[..., None]).exp(), X, "cumsum#0 cumsum#1 sub#0 exp#0", "same",
    ),
    "scale_after_product": (lambda x: (1e4 * x @ x.transpose(-1, -2)).view(-1) * 0.125, X, "matmul#0 mul#1", ""),
    "scale_after_sum": (lambda x: (1e4 * x).sum() / 64, X, "sum#0 div#0", ""),
    "long_sum": (lambda x: (20 * x).sigmoid().mul(20).sum(), LONG, "sum#0", ""),
    "long_product": (lambda x: x.relu()[None] @ x.relu()[:, None], LONG, "matmul#0", ""),
    "running_sum": (lambda x: x.cumsum(0), LONG, "cumsum#0", "same"),
    "long_recurrence": (_recurrence, X, "add#0 " + STEPS, "same"),
    "decomposed_norm": (
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), X, "mul#0 mean#0 add#0 rsqrt#0", "same",
    ),
    "product_squared": (lambda x: (100 * x).square(), X, "square#0", ""),
    "variance_of_moments": (_local_variance, X, "avg_pool1d#0 avg_pool1d#1 mul#0 mul#1 sub#0", "same"),
    "nearly_equal": (lambda x: (x * 1e-4 + 1) - (x * 1e-5 + 1), X, "sub#0", "same"),
    "range_overflows": (lambda x: x.sigmoid() * 1024 * (x.sigmoid() * 1024), X, "mul#2", ""),
    "added_to_limit": (lambda x: 10 * x + torch.where(x > 0, -65504.0, 0.0), X, "add#0", ""),
    "positions_collide": (lambda x: (torch.ones(3000).cumsum(-1) - 1).long(), X, "cumsum#0 sub#0", "same"),
    "phase_lost": (lambda x: (torch.arange(5000.0)[:, None] * x[0].abs()).cos(), X, "mul#0 cos#0", "same"),
    "large_addend": (
        lambda x: (x + 0.5 * torch.arange(4096.0)[-8:]).softmax(-1), X, "mul#0 add#0", "same",
    ),
    "rounds_to_one": (lambda x: (-(x.abs() + 3) * 1e-5).exp(), X, "exp#0", "same"),
    "norm_backward": (lambda x: F.layer_norm(x, (4,)), MANY, "layer_norm#0", "same"),
}  # fmt: skip


@pytest.mark.parametrize("code", FOUND)
def test_a_pattern_is_found_with_all_that_takes_part_in_it(code: str) -> None:
    lines, batch, fp16, bf16 = FOUND[code]
    marks = marks_of(lines, batch)
    assert codes(marks, "fp16").get(code, set()) == set(fp16.split())
    assert codes(marks, "bf16").get(code, set()) == set((fp16 if bf16 == "same" else bf16).split())
    for mark in marks:
        (reason,) = mark.reasons
        assert any(digit in reason.detail for digit in "0123456789")
        assert isinstance(reason.evidence["number"], int | float)
        assert reason.evidence["cure"] == cure_of(reason.code) != ""


NOT_FOUND = {
    "softmax_then_log": (lambda x: x.log_softmax(-1).log(), X),
    "sigmoid_then_log": (lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()), X),
    "one_minus_probability": (lambda x: (1 - x.tanh()).pow(2), X),
    "log_sum_exp": (lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1).log(), X),
    "log_of_uniform": (lambda x: (torch.randn(8) + 1e-6).log(), X),
    "log_near_zero": (lambda x: (x.relu() + 1e-3).log(), X),
    "divisor_near_zero": (lambda x: x / (x.relu().sum() + 1e-3), X),
    "root_near_zero": (lambda x: (x.square().sum(-1) + 1e-4).sqrt(), X),
    "exp_overflows": (lambda x: (x.exp(), (100 * (x - x.amax())).exp(), (x - x.logsumexp(0)).exp()), X),
    "exp_of_difference": (lambda x: (x - x.cumsum(-1)).exp(), X),
    "scale_after_product": (lambda x: (1e4 * x @ x.t()) * 8, X),
    "scale_after_sum": (lambda x: x.sum() / 64, X),
    "long_sum": (lambda x: x.mean(), LONG),
    "long_product": (lambda x: x[None] @ x[:, None], LONG),
    "running_sum": (lambda x: x.cumsum(0), X),
    "long_recurrence": (lambda x: sum((0.1 * x.tanh() for _ in range(40)), x), X),
    "decomposed_norm": (lambda x: F.rms_norm(x, (8,)), X),
    "product_squared": (lambda x: x.square(), X),
    "variance_of_moments": (lambda x: F.avg_pool1d((x - 1) * (x - 1), 2), X),
    "nearly_equal": (lambda x: x - x.cos(), X),
    "range_overflows": (lambda x: x.sigmoid() * 100 * (x.sigmoid() * 100), X),
    "added_to_limit": (lambda x: x + torch.where(x > 0, -65504.0, 0.0), X),
    "positions_collide": (lambda x: (torch.ones(200).cumsum(-1) - 1).long(), X),
    "phase_lost": (lambda x: (torch.arange(10.0)[:, None] * x[0].abs()).cos(), X),
    "large_addend": (lambda x: (x + 0.5 * torch.arange(8.0)).softmax(-1), X),
    "rounds_to_one": (lambda x: (-(x.abs() + 3)).exp(), X),
    "norm_backward": (lambda x: F.layer_norm(x, (8,)), X),
}


@pytest.mark.parametrize("code", NOT_FOUND)
def test_a_pattern_is_not_found_where_it_is_not(code: str) -> None:
    lines, batch = NOT_FOUND[code]
    marks = marks_of(lines, batch)
    assert code not in codes(marks, "fp16")
    assert code not in codes(marks, "bf16")


def test_every_pattern_has_both_tests() -> None:
    known = {pattern.code.value for pattern in PATTERNS}
    assert known == set(FOUND) == set(NOT_FOUND)


def test_the_mean_of_many_losses_is_a_long_sum() -> None:
    def lines(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long))

    many = torch.zeros(40000, 20)
    assert codes(marks_of(lines, many), "fp16")["long_sum"] == {"cross_entropy#0"}
    assert "long_sum" not in codes(marks_of(lines, many[:100]), "fp16")


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 16).softmax(-1)


def test_patterns_reach_across_modules_and_movement() -> None:
    inner = Inner()
    marks = marks_of(lambda x: inner(x).reshape(-1).contiguous()[3:].unsqueeze(0).log(), X)
    assert codes(marks, "fp16")["softmax_then_log"] == {"softmax#0", "log#0"}


def test_what_no_data_can_make_harmless_is_proved() -> None:
    def proved(lines, *batch: torch.Tensor) -> set[tuple[str, str]]:
        marks = marks_of(lines, *batch)
        return {(mark.reasons[0].code.value, mark.format) for mark in marks if mark.verdict == "must"}

    ones = torch.ones(300)
    assert proved(lambda x: (torch.arange(1000.0)[:, None] * ones[None]).sin(), X) == {("phase_lost", "bf16")}
    assert proved(lambda x: (torch.arange(300.0) + 1).long(), X) == {("positions_collide", "bf16")}
    # A part of the positions, or a count of what the batch marks, need not reach the end.
    assert proved(lambda x: (torch.arange(1000.0)[:10, None] * ones[None]).sin(), X) == set()
    assert proved(lambda x: ((x[0] > 0).float().repeat(100).cumsum(0) + 1).long(), X) == set()


def test_without_data_a_bound_that_needs_it_is_not_claimed() -> None:
    lines = lambda x: ((4 * x).exp(), (1000 * x).cos(), x.sum())  # noqa: E731 three calls
    assert codes(marks_of(lines, X, known=False), "fp16") == {"exp_overflows": {"exp#0"}}
    (mark,) = marks_of(lines, X, known=False)
    assert mark.reasons[0].detail == "exp overflows fp16 above 11.1, and nothing bounds its argument"


def test_the_backward_of_a_norm_is_told_on_cpu_only() -> None:
    assert "norm_backward" not in codes(marks_of(FOUND["norm_backward"][0], MANY, device="cuda"), "bf16")


def test_what_no_policy_casts_is_not_marked() -> None:
    def lines(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x.softmax(-1).log()

    assert marks_of(lines, X) == ()


def test_a_graph_whose_arguments_are_not_known_says_nothing() -> None:
    graph: OpGraph = chain(node("a", "softmax"), node("b", "log"), node("c", "exp"))
    assert pattern_marks(graph, ("fp16",)) == ()


def test_explanations_are_in_the_order_of_the_table() -> None:
    marks = marks_of(lambda x: x.softmax(-1).log(), X)
    found = explanations(tuple(reversed(marks)))
    site = next(mark.site for mark in marks if mark.site.op == "log")
    assert [reason.code for reason in found[site, "fp16"]] == [ReasonCode.SOFTMAX_THEN_LOG, ReasonCode.LOG_NEAR_ZERO]
    assert [reason.code for reason in found[site, "bf16"]] == [ReasonCode.SOFTMAX_THEN_LOG]
