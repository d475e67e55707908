"""One tiny model for each reason, and the number in its sentence."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoprec.analysis.causes import _KINDS, Seen, cause_of
from autoprec.analysis.marks import Reason, ReasonCode
from autoprec.analysis.site_numbers import SiteNumbers, site_numbers
from autoprec.numerics import format_named
from tests.op_graphs import node
from tests.unit.analysis.recorded import device_format, recorded, site

Case = tuple[ReasonCode, Callable[[Any, torch.Tensor], torch.Tensor], list[float], str, str, str]

HALF = [300.0, 100.0, -200.0, 1.0]
CASES: dict[str, Case] = {
    "a reader of what is too large": (
        ReasonCode.READS_OVERFLOW, lambda net, x: (net.gain * x / 1e5).sum(), [1e5, 2e5, 1.0, 3.0], "div#0", "fp16",
        "reads values up to 2e+05, and fp16 ends at 65504",
    ),
    "a product": (
        ReasonCode.OVERFLOW, lambda net, x: (net.gain * x).square().sum(), HALF, "square#0", "fp16",
        "square of values up to 300 reaches 9e+04, and fp16 ends at 65504",
    ),
    "a sum": (
        ReasonCode.OVERFLOW, lambda net, x: (net.gain * x).sum(), [3e4, 2e4, 3e4, 1e4], "sum#0", "fp16",
        "a sum of 4 values up to 3e+04 reaches 9e+04, and fp16 ends at 65504",
    ),
    "a scan": (
        ReasonCode.OVERFLOW, lambda net, x: (net.gain * x).cumsum(0).mean(), [3e4, 2e4, 3e4, 1e4], "cumsum#0", "fp16",
        "a cumsum of 4 values up to 3e+04 reaches 9e+04, and fp16 ends at 65504",
    ),
    "an exponential": (
        ReasonCode.OVERFLOW, lambda net, x: (net.gain * x).exp().sum(), [14.0, 1.0, 2.0, 3.0], "exp#0", "fp16",
        "exp gives values up to 1.2e+06, and fp16 ends at 65504",
    ),
    "a division by what vanished": (
        ReasonCode.OVERFLOW_INSIDE, lambda net, x: (x / (net.gain * x)).sum(), [1e-9, 1.0, 1e-9, 1.0], "div#0", "fp16",
        "4 of its inputs are 0 in fp16 and not in FP32, so div gives 2 values that are not finite",
    ),
    "a count": (
        ReasonCode.INTEGERS_INEXACT, lambda net, x: (net.gain * x).cumsum(0).mean(), [1.0] * 300, "cumsum#0", "bf16",
        "counts to 300, and bf16 holds every whole number only up to 256",
    ),
    "an angle": (
        ReasonCode.PHASE_TOO_COARSE, lambda net, x: (net.gain * x).sin().sum(), [1000.5, 1.0, 2.0], "sin#0", "bf16",
        "reads angles up to 1e+03, where bf16 steps by 4 rad",
    ),
    "a difference": (
        ReasonCode.CANCELLATION, lambda net, x: (net.gain * x - 256.3).sum(), [257.3] * 4, "sub#0", "bf16",
        "subtracts numbers 257 times as large as what is left: 8 of the 8 bits of bf16 cancel",
    ),
    "a result too small": (
        ReasonCode.UNDERFLOW, lambda net, x: (net.gain * x).exp().sum(), [-20.0, -30.0, 1.5, 2.5], "exp#0", "fp16",
        "2 of its 4 results are 0 in fp16 and not in FP32",
    ),
    "an addend too small": (
        ReasonCode.SWAMPING, lambda net, x: (net.gain * x + x * 0.001).sum(), [256.3, 256.0, 1.0, 2.0], "add#0", "bf16",
        "100% of its additions change nothing: the smaller addend is under half a spacing",
    ),
    "an ordinary rounding": (
        ReasonCode.MAGNIFIED, lambda net, x: (net.gain * x).tanh().sum(), [0.3, 0.7, 0.1, 0.2], "tanh#0", "bf16",
        "results up to 0.604 are rounded to steps of 0.0039, off by ",
    ),
    "an exact result": (
        ReasonCode.BACKWARD_ONLY, lambda net, x: (net.gain * x).relu().sum(), [1.0, -2.0, 3.0, 0.5], "relu#0", "bf16",
        "its results are exact in bf16, its gradient is not",
    ),
}  # fmt: skip


def caused(
    function: Callable[[Any, torch.Tensor], torch.Tensor], x: list[float], where: str, name: str, *,
    alone: float = math.inf, num_repeats: int = 1,
) -> Reason:  # fmt: skip
    recording = recorded(function, torch.tensor(x), gain=torch.ones(len(x)))
    numbers = site_numbers(recording, device_format(name), [site(where)])[site(where)]
    return cause_of(Seen(numbers=numbers, format=format_named(name), alone=alone, num_repeats=num_repeats))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_each_kind_of_fault_is_told_with_its_number(case: Case) -> None:
    code, function, x, where, name, sentence = case
    reason = caused(function, x, where, name)
    assert reason.code is code
    assert reason.detail.startswith(sentence)
    json.dumps(dict(reason.evidence), allow_nan=False)


def test_a_loop_is_told_by_its_length() -> None:
    def rounded(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (net.gain * x).tanh().sum()

    reason = caused(rounded, [0.3, 0.7], "tanh#0", "bf16", num_repeats=32)
    assert reason.code is ReasonCode.BUILD_UP
    assert reason.detail.startswith("runs 32 times one after the other, and each rounds what the last one left; ")
    assert caused(rounded, [0.3, 0.7], "tanh#0", "bf16", num_repeats=15).code is ReasonCode.MAGNIFIED

    def swamped(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (net.gain * x + x * 0.001).sum()

    assert (
        ", and 100% of the additions change nothing; "
        in caused(swamped, [0.3, 0.7], "add#0", "bf16", num_repeats=16).detail
    )


def test_what_only_passes_numbers_on_does_not_build_up() -> None:
    reason = caused(lambda net, x: (net.gain * x).relu().sum(), [1.0, 2.0], "relu#0", "bf16", num_repeats=99)
    assert reason.code is ReasonCode.BACKWARD_ONLY


def test_a_missing_kernel_is_told_in_torchs_words() -> None:
    numbers = SiteNumbers(site=site("inv#0"), node=node("inv", "inv"), raised="not for BFloat16", num_nonfinite=3)
    reason = cause_of(Seen(numbers=numbers, format=format_named("bf16"), alone=math.inf, num_repeats=1))
    assert reason.code is ReasonCode.NO_KERNEL
    assert reason.detail.startswith("inv does not run in bf16: not for BFloat16; ")


def test_an_overflow_between_operands_and_result_is_told_apart() -> None:
    numbers = SiteNumbers(
        site=site("std#0"), node=node("std", "std"), max_input=300.0, max_output=150.0, num_nonfinite=2, num_outputs=4
    )  # fmt: skip
    reason = cause_of(Seen(numbers=numbers, format=format_named("fp16"), alone=math.inf, num_repeats=1))
    assert reason.code is ReasonCode.OVERFLOW_INSIDE
    assert reason.detail.startswith(
        "std of values up to 300 gives 2 results that are not finite, though FP32 gives at most 150: "
        "it overflows inside"
    )


@pytest.mark.parametrize(
    ("alone", "effect"),
    [
        (math.inf, "with it alone low, the loss or a gradient is not finite"),
        (0.1234, "with it alone low, the gradient is off by 0.12 of its norm"),
        (math.nan, "the step is broken unless it stays FP32 with the others"),
    ],
)
def test_what_the_site_does_alone_ends_the_sentence(alone: float, effect: str) -> None:
    reason = caused(lambda net, x: (net.gain * x).tanh().sum(), [0.3, 0.7], "tanh#0", "bf16", alone=alone)
    assert reason.detail.endswith(f"; {effect}")
    json.dumps(dict(reason.evidence), allow_nan=False)


def test_every_kind_has_a_model_here() -> None:
    apart = {ReasonCode.NO_KERNEL, ReasonCode.BUILD_UP}
    assert {code for code, _ in _KINDS} == {case[0] for case in CASES.values()} | apart
