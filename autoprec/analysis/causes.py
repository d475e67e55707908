"""Why a site that the repair needs breaks in a format: one reason with a number, from what was seen at it.

The kinds are tried from the most certain on: what does not run, what leaves the range, what vanishes, what is too
coarse, and last what only the gradient shows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoprec.analysis.marks import Reason, ReasonCode
from autoprec.analysis.site_numbers import SiteNumbers
from autoprec.numerics import Format, ulp
from autoprec.ops import lookup

_ANGLES = frozenset({"sin", "cos", "tan", "sinc", "polar"})
# From a result of so many times fewer digits on, a subtraction is told as cancellation.
_CANCELS = 8.0
_SWAMPED = 0.05
_UNROLLED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What is known of a broken site: its numbers, the damage it does alone, and how often its line runs in a step."""

    numbers: SiteNumbers
    format: Format
    alone: float
    num_repeats: int


_Tell: TypeAlias = Callable[[Seen], str]


def cause_of(seen: Seen) -> Reason:
    """Return the reason that fits what was seen at a site."""
    code, sentence = next((code, text) for code, tell in _KINDS if (text := tell(seen)))
    return Reason(code=code, detail=f"{sentence}; {_effect(seen.alone)}", evidence=_evidence(seen))


def _effect(alone: float) -> str:
    if math.isnan(alone):
        return "the step is broken unless it stays FP32 with the others"
    if math.isinf(alone):
        return "with it alone low, the loss or a gradient is not finite"
    return f"with it alone low, the gradient is off by {alone:.2g} of its norm"


def _evidence(seen: Seen) -> Mapping[str, Any]:
    numbers = seen.numbers
    return {
        "max_input": numbers.max_input,
        "max_output": numbers.max_output,
        "num_outputs": numbers.num_outputs,
        "num_inputs_over": numbers.num_inputs_over,
        "num_nonfinite": numbers.num_nonfinite,
        "num_zeroed": numbers.num_zeroed,
        "num_flushed": numbers.num_flushed,
        "output_error": numbers.error,
        "cancellation": numbers.cancellation,
        "swamped_frac": numbers.swamped_frac,
        "error_alone": seen.alone if math.isfinite(seen.alone) else str(seen.alone),
    }


def _no_kernel(seen: Seen) -> str:
    return (
        f"{seen.numbers.node.op} does not run in {seen.format.name}: {seen.numbers.raised}"
        if seen.numbers.raised
        else ""
    )


def _reads_overflow(seen: Seen) -> str:
    numbers = seen.numbers
    if not numbers.num_inputs_over:
        return ""
    return f"reads values up to {numbers.max_input:.3g}, and {seen.format.name} ends at {seen.format.max:g}"


def _overflow(seen: Seen) -> str:
    numbers = seen.numbers
    if not numbers.num_nonfinite or numbers.max_output <= seen.format.max:
        return ""
    limit = f"{seen.format.name} ends at {seen.format.max:g}"
    op, reached = numbers.node.op, f"{numbers.max_output:.3g}"
    if (
        op in ("mul", "square", "pow", "var", "bmm", "matmul", "baddbmm", "einsum", "linear")
        or lookup(op).cost == "flops"
    ):
        return f"{op} of values up to {numbers.max_input:.3g} reaches {reached}, and {limit}"
    if lookup(op).family in ("reduction", "scan", "loss"):
        terms = _num_terms(seen)
        return f"a {op} of {terms:,} values up to {numbers.max_input:.3g} reaches {reached}, and {limit}"
    return f"{op} gives values up to {reached}, and {limit}"


def _overflow_inside(seen: Seen) -> str:
    numbers = seen.numbers
    if not numbers.num_nonfinite:
        return ""
    if numbers.num_flushed:
        return (
            f"{numbers.num_flushed:,} of its inputs are 0 in {seen.format.name} and not in FP32, "
            f"so {numbers.node.op} gives {numbers.num_nonfinite:,} values that are not finite"
        )
    return (
        f"{numbers.node.op} of values up to {numbers.max_input:.3g} gives {numbers.num_nonfinite:,} results that are "
        f"not finite, though FP32 gives at most {numbers.max_output:.3g}: it overflows inside, "
        "or divides by what vanished"
    )


def _integers(seen: Seen) -> str:
    numbers, largest = seen.numbers, seen.format.max_exact_integer
    if not numbers.is_integer or numbers.max_output <= largest or not numbers.error:
        return ""
    return (
        f"counts to {numbers.max_output:,.0f}, and {seen.format.name} holds every whole number only up to {largest:,}"
    )


def _phase(seen: Seen) -> str:
    numbers = seen.numbers
    step = ulp(numbers.max_input, seen.format)
    if numbers.node.op not in _ANGLES or step < 1 / 64:
        return ""
    return f"reads angles up to {numbers.max_input:.3g}, where {seen.format.name} steps by {step:.2g} rad"


def _cancellation(seen: Seen) -> str:
    numbers = seen.numbers
    if numbers.node.op not in ("sub", "add") or numbers.cancellation < _CANCELS:
        return ""
    lost = math.log2(numbers.cancellation)
    return (
        f"subtracts numbers {numbers.cancellation:.3g} times as large as what is left: {lost:.0f} of the "
        f"{seen.format.precision} bits of {seen.format.name} cancel"
    )


def _build_up(seen: Seen) -> str:
    numbers = seen.numbers
    if seen.num_repeats < _UNROLLED or lookup(numbers.node.op).numerics == "clear":
        return ""
    swamped = f", and {numbers.swamped_frac:.0%} of the additions change nothing" if numbers.swamped_frac else ""
    return f"runs {seen.num_repeats:,} times one after the other, and each rounds what the last one left{swamped}"


def _swamping(seen: Seen) -> str:
    numbers = seen.numbers
    if numbers.swamped_frac < _SWAMPED:
        return ""
    return f"{numbers.swamped_frac:.0%} of its additions change nothing: the smaller addend is under half a spacing"


def _underflow(seen: Seen) -> str:
    numbers = seen.numbers
    if not numbers.num_zeroed:
        return ""
    return f"{numbers.num_zeroed:,} of its {numbers.num_outputs:,} results are 0 in {seen.format.name} and not in FP32"


def _magnified(seen: Seen) -> str:
    numbers = seen.numbers
    if not numbers.error:
        return ""
    spacing = ulp(numbers.max_output, seen.format)
    return (
        f"results up to {numbers.max_output:.3g} are rounded to steps of {spacing:.2g}, off by {numbers.error:.1g}, "
        "which what follows magnifies"
    )


def _backward_only(seen: Seen) -> str:
    return f"its results are exact in {seen.format.name}, its gradient is not"


def _num_terms(seen: Seen) -> int:
    node = seen.numbers.node
    largest = max((meta.numel for meta in node.inputs), default=1)
    return (
        largest
        if lookup(node.op).family == "scan"
        else largest // max((meta.numel for meta in node.outputs), default=1)
    )


_KINDS: Sequence[tuple[ReasonCode, _Tell]] = (
    (ReasonCode.NO_KERNEL, _no_kernel),
    (ReasonCode.READS_OVERFLOW, _reads_overflow),
    (ReasonCode.OVERFLOW, _overflow),
    (ReasonCode.OVERFLOW_INSIDE, _overflow_inside),
    (ReasonCode.INTEGERS_INEXACT, _integers),
    (ReasonCode.PHASE_TOO_COARSE, _phase),
    (ReasonCode.CANCELLATION, _cancellation),
    (ReasonCode.BUILD_UP, _build_up),
    (ReasonCode.UNDERFLOW, _underflow),
    (ReasonCode.SWAMPING, _swamping),
    (ReasonCode.MAGNIFIED, _magnified),
    (ReasonCode.BACKWARD_ONLY, _backward_only),
)
