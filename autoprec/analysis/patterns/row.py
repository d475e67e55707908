"""What a row of the table of patterns is, and what a match says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from autoprec.analysis.marks import ReasonCode, Verdict
from autoprec.analysis.patterns.walk import Walk
from autoprec.graph.opgraph import OpNode
from autoprec.numerics import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A pattern found: the calls that make it up, the sentence with its number, and whether it is proved.

    `number` is what the sentence turns on; `verdict` is `must` only where no data can make it harmless.
    """

    nodes: Sequence[OpNode | None]
    detail: str
    number: float
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    verdict: Verdict = "prefer"


Matcher: TypeAlias = Callable[[Walk, OpNode, Format], Match | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """One row: what it is called, at which ops it is looked for, how it is told, and the rewrite that cures it."""

    code: ReasonCode
    ops: tuple[str, ...]
    match: Matcher
    cure: str


def is_short(fmt: Format) -> bool:
    """Return whether a format has less range than FP32, so that what fits FP32 may overflow or vanish in it."""
    return fmt.exponent_bits < 8
