"""Python constants that a format cannot hold: masks beyond its range, guards that vanish, bounds that become one.

That a constant is lost can be read off the graph. Whether its loss does harm depends on the values it meets (a mask of
-1e9 that becomes -inf is fine unless a row has nothing else), so it is left to a run:
see `autoprec.analysis.diagnosis`. Only what raises an error whatever the values is a fault by itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autoprec.analysis.marks import Mark, Reason, ReasonCode, Verdict
from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS, Format, format_named, next_down, round_scalar

# Torch converts the number of these ops to the dtype of the tensor, and raises RuntimeError if it is finite there
# and infinite here. Other ops compute with it in FP32 and round the result.
_CONVERT = frozenset({"masked_fill", "clamp", "clamp_min", "clamp_max", "index_fill", "pad"})
_FILL = frozenset({"where", "add", "sub", "mul"}) | _CONVERT
_GUARD = frozenset({"add", "clamp", "clamp_min", "normalize", "cosine_similarity"})
_BOUND = frozenset({"clamp", "clamp_max"})

# The eps that an op uses where the call names none. Functions written in Python (normalize) always name theirs.
_DEFAULT_GUARD = {"cosine_similarity": 1e-8}

# A guard is small, and a bound is near one: other constants that round differently are ordinary rounding.
_LARGEST_GUARD = 1e-3
_FARTHEST_BOUND = 0.5

# `torch.finfo(x.dtype).min` is written as this number while x is FP32; in a low run the same code gives another one.
_LARGEST_FP32 = FORMATS["fp32"].max


@dataclass(frozen=True, kw_only=True, slots=True)
class LostConstant:
    """A constant of one call that `format` turns into `rounded`.

    `replacement` is a number of the format that would serve in its place. `raises`: torch refuses the constant.
    `by_default`: the call does not name it, the op does.
    """

    node: OpNode
    format: str
    code: ReasonCode
    constant: float
    rounded: float
    replacement: float
    raises: bool = False
    by_default: bool = False


def lost_constants(op_graph: OpGraph, formats: Sequence[str]) -> tuple[LostConstant, ...]:
    """Return the constants that one of `formats` cannot hold, in execution order."""
    lows = [format_named(name) for name in formats]
    nodes = [node for node in op_graph.calls() if node.is_castable and _is_floating(node)]
    return tuple(lost for node in nodes for low in lows for lost in _lost(node, low))


def constant_marks(lost: Sequence[LostConstant]) -> tuple[Mark, ...]:
    """Return one mark for each site and constant of `lost`.

    `must` if torch raises an error whatever the values, else `prefer`.
    """
    groups: dict[tuple[Site | None, str, ReasonCode, float], list[LostConstant]] = {}
    for each in lost:
        groups.setdefault((each.node.site, each.format, each.code, each.constant), []).append(each)
    return tuple(_mark(group) for group in groups.values())


def _is_floating(node: OpNode) -> bool:
    return any(meta.is_floating for meta in node.outputs) and any(meta.is_floating for meta in node.inputs)


def _lost(node: OpNode, low: Format) -> Iterator[LostConstant]:
    given = tuple(dict.fromkeys(float(constant) for constant in node.constants))
    default = _DEFAULT_GUARD.get(node.op)
    if default is not None and not any(0 < constant <= _LARGEST_GUARD for constant in given):
        yield from _judge(node, low, default, by_default=True)
    for constant in given:
        yield from _judge(node, low, constant)


@lru_cache(maxsize=1024)
def _rounded(constant: float, low: Format) -> float:
    return round_scalar(constant, low)


def _judge(node: OpNode, low: Format, constant: float, *, by_default: bool = False) -> Iterator[LostConstant]:
    rounded = _rounded(constant, low)
    raises = False
    if node.op in _FILL and math.isfinite(constant) and not math.isfinite(rounded):
        code, replacement = ReasonCode.CONSTANT_OVERFLOWS, math.copysign(low.max, constant)
        raises = node.op in _CONVERT and abs(constant) != _LARGEST_FP32
    elif node.op in _GUARD and 0 < constant <= _LARGEST_GUARD and rounded == 0:
        code, replacement = ReasonCode.GUARD_VANISHES, low.min_normal
    elif node.op in _BOUND and _FARTHEST_BOUND < constant < 1 and rounded == 1:
        code, replacement = ReasonCode.BOUND_ROUNDS_TO_ONE, next_down(1.0, low)
    else:
        return
    yield LostConstant(
        node=node, format=low.name, code=code, constant=constant, rounded=rounded, replacement=replacement,
        raises=raises, by_default=by_default,
    )  # fmt: skip


def _mark(group: Sequence[LostConstant]) -> Mark:
    lost = group[0]
    assert lost.node.site is not None  # lost_constants looks at calls with a site only
    reason = Reason(
        code=lost.code,
        detail=_detail(lost),
        evidence={
            "constant": lost.constant,
            "rounded": lost.rounded if math.isfinite(lost.rounded) else str(lost.rounded),
            "replacement": lost.replacement,
            "raises": lost.raises,
            "num_calls": len(group),
        },
    )
    verdict: Verdict = "must" if lost.raises else "prefer"
    return Mark(site=lost.node.site, format=lost.format, verdict=verdict, reasons=(reason,))


def _detail(lost: LostConstant) -> str:
    if abs(lost.constant) == _LARGEST_FP32:
        return f"{lost.constant:g}, FP32's own limit, is beyond {lost.format}; fine if written as finfo(x.dtype)"
    what = f"{lost.constant:g}" if not lost.by_default else f"the default eps of {lost.constant:g}"
    sentence = f"{what} becomes {lost.rounded:g} in {lost.format}"
    if lost.code is ReasonCode.BOUND_ROUNDS_TO_ONE:
        sentence = f"the bound 1 - {1 - lost.constant:.2g} becomes 1 in {lost.format}"
    if lost.raises:
        return f"{sentence}, and torch refuses it in {lost.node.op} with an error"
    return sentence
