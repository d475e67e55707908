"""Marks: what one analysis says about one site in one format, and why."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from autoprec.graph.site import Site

Verdict: TypeAlias = Literal["must", "prefer", "free"]

# From the weakest to the strongest; the strongest of several verdicts on a site counts.
VERDICTS: tuple[Verdict, ...] = ("free", "prefer", "must")


class ReasonCode(StrEnum):
    """Every reason an analysis can give."""

    UNKNOWN_OP = "unknown_op"
    DENY_OP = "deny_op"
    CONTAMINATED = "contaminated"
    LEFT_ALONE = "left_alone"
    CONSTANT_OVERFLOWS = "constant_overflows"
    GUARD_VANISHES = "guard_vanishes"
    BOUND_ROUNDS_TO_ONE = "bound_rounds_to_one"
    NO_KERNEL = "no_kernel"
    READS_OVERFLOW = "reads_overflow"
    OVERFLOW = "overflow"
    OVERFLOW_INSIDE = "overflow_inside"
    UNDERFLOW = "underflow"
    PHASE_TOO_COARSE = "phase_too_coarse"
    INTEGERS_INEXACT = "integers_inexact"
    CANCELLATION = "cancellation"
    SWAMPING = "swamping"
    BUILD_UP = "build_up"
    MAGNIFIED = "magnified"
    AS_GIVEN_BREAKS = "as_given_breaks"
    READ_AS_GIVEN = "read_as_given"
    BACKWARD_ONLY = "backward_only"
    KERNEL_WRONG = "kernel_wrong"
    # what `autoprec.analysis.patterns` reads off the graph
    SOFTMAX_THEN_LOG = "softmax_then_log"
    SIGMOID_THEN_LOG = "sigmoid_then_log"
    ONE_MINUS_PROBABILITY = "one_minus_probability"
    LOG_SUM_EXP = "log_sum_exp"
    LOG_OF_UNIFORM = "log_of_uniform"
    LOG_NEAR_ZERO = "log_near_zero"
    DIVISOR_NEAR_ZERO = "divisor_near_zero"
    ROOT_NEAR_ZERO = "root_near_zero"
    EXP_OVERFLOWS = "exp_overflows"
    EXP_OF_DIFFERENCE = "exp_of_difference"
    SCALE_AFTER_PRODUCT = "scale_after_product"
    SCALE_AFTER_SUM = "scale_after_sum"
    LONG_SUM = "long_sum"
    LONG_PRODUCT = "long_product"
    RUNNING_SUM = "running_sum"
    LONG_RECURRENCE = "long_recurrence"
    DECOMPOSED_NORM = "decomposed_norm"
    PRODUCT_SQUARED = "product_squared"
    VARIANCE_OF_MOMENTS = "variance_of_moments"
    NEARLY_EQUAL = "nearly_equal"
    RANGE_OVERFLOWS = "range_overflows"
    ADDED_TO_LIMIT = "added_to_limit"
    POSITIONS_COLLIDE = "positions_collide"
    PHASE_LOST = "phase_lost"
    LARGE_ADDEND = "large_addend"
    ROUNDS_TO_ONE = "rounds_to_one"
    NORM_BACKWARD = "norm_backward"
    FUSED_NORM = "fused_norm"


# Faults of degree: digits are lost, and how many a run can spare only a run tells. What leaves the range of a format,
# counts past it, has no kernel or a wrong one is broken however the run goes.
OF_DEGREE = frozenset(
    {
        ReasonCode.CANCELLATION,
        ReasonCode.BUILD_UP,
        ReasonCode.SWAMPING,
        ReasonCode.UNDERFLOW,
        ReasonCode.MAGNIFIED,
        ReasonCode.BACKWARD_ONLY,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a site got its verdict: a code for programs, a sentence for people, and the numbers behind it."""

    code: ReasonCode
    detail: str
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The verdict on one site in one format.

    `must`: a measured or provable fault; `prefer`: FP32 by default, the search may lower it; `free`: nothing known
    against it.
    """

    site: Site
    format: str
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()


def merge(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """Return one mark for each site and format, in order of first appearance.

    It has the strongest verdict, and every reason once: those of the strongest marks first.
    """
    groups: dict[tuple[Site, str], list[Mark]] = {}
    for mark in marks:
        groups.setdefault((mark.site, mark.format), []).append(mark)
    return tuple(_strongest(group) if len(group) > 1 else group[0] for group in groups.values())


def _strongest(group: list[Mark]) -> Mark:
    ranked = sorted(group, key=lambda mark: -VERDICTS.index(mark.verdict))
    reasons = dict.fromkeys(reason for mark in ranked for reason in mark.reasons)
    first = ranked[0]
    return Mark(site=first.site, format=first.format, verdict=first.verdict, reasons=tuple(reasons))
