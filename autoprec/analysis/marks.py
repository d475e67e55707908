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
    return tuple(_strongest(group) for group in groups.values())


def _strongest(group: list[Mark]) -> Mark:
    ranked = sorted(group, key=lambda mark: -VERDICTS.index(mark.verdict))
    reasons = dict.fromkeys(reason for mark in ranked for reason in mark.reasons)
    first = ranked[0]
    return Mark(site=first.site, format=first.format, verdict=first.verdict, reasons=tuple(reasons))
