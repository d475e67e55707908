"""Patterns around counted numbers: indices, phases, position biases, and states carried from step to step."""

from collections.abc import Iterator

from autoprec.analysis.marks import ReasonCode
from autoprec.analysis.patterns.row import Match, Pattern
from autoprec.analysis.patterns.walk import Walk
from autoprec.analysis.ranges import Interval
from autoprec.graph.opgraph import OpNode, Ref
from autoprec.numerics import Format, ulp

_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "div",
    "cumsum",
    "floor",
    "round",
    "clamp",
    "remainder",
    "floor_divide",
    "where",
    "cat",
    "stack",
)
_TO_PHASE = frozenset({"add", "sub", "mul", "div", "matmul", "mm", "bmm", "outer", "einsum", "cat", "stack"})
_LOST_PHASE = 0.1  # rad: error of a phase that is worth telling
_WRONG_PHASE = 1.0  # rad: with which a rotation points anywhere
_LOST_SCORE = 0.5
_LONG_CHAIN = 32


def _positions_collide(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    if node.name not in walk.is_index:
        return None
    values = [each for each in _floating(walk, node) if each.is_integer and each.is_finite]
    top = max((each.magnitude for each in values), default=0.0)
    limit = fmt.max_exact_integer
    if top <= limit:
        return None
    proved = any(each.is_tight and each.magnitude > limit for each in values)
    return Match(
        nodes=(node,),
        detail=f"positions of up to {top:,.0f} become indices, and {fmt.name} holds all integers only up to {limit:,}: "
        "neighbors pick the same row",
        number=top,
        evidence={"max_exact_integer": limit, "step": ulp(top, fmt)},
        verdict="must" if proved else "prefer",
    )


def _floating(walk: Walk, node: OpNode) -> Iterator[Interval]:
    """Yield the intervals of the floating values that a call reads and returns."""
    if any(meta.is_floating for meta in node.outputs):
        yield walk.ranges[node.name]
    for value in node.args:
        if isinstance(value, Ref) and any(meta.is_floating for meta in walk.graph[value.name].outputs):
            yield walk.ranges[value.name]


def _phase_lost(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    phase = walk.interval(node, 0, "input")
    if not phase.is_finite:
        return None
    step = ulp(phase.magnitude, fmt)
    if step / 2 < _LOST_PHASE:
        return None
    proved = phase.is_tight and step / 2 >= _WRONG_PHASE
    return Match(
        nodes=(*_phase_sites(walk, node), node),
        detail=f"the {node.op} of phases of up to {phase.magnitude:,.4g} rad, in steps of {step:g} rad in {fmt.name}",
        number=step,
        evidence={"phase": phase.magnitude},
        verdict="must" if proved else "prefer",
    )


def _phase_sites(walk: Walk, node: OpNode) -> Iterator[OpNode]:
    """Yield the calls that compute the phase from positions, the last one first, up to a few."""
    todo, seen = [walk.operand(node, 0, "input")], set[str]()
    while todo and len(seen) < 16:
        each = todo.pop()
        if each is None or each.name in seen or each.op not in _TO_PHASE:
            continue
        seen.add(each.name)
        yield each
        todo += [walk.origin(value) for value in each.args]


def _large_addend(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    if node.name not in walk.is_score and node.name not in walk.is_phase:
        return None
    for place in (0, 1):
        addend, source = walk.interval(node, place), walk.operand(node, place)
        is_counted = source is not None and source.name in walk.is_position
        if not is_counted or not addend.is_finite or ulp(addend.magnitude, fmt) < _LOST_SCORE:
            continue
        step = ulp(addend.magnitude, fmt)
        return Match(
            nodes=(source, node),
            detail=f"adds a position of up to {addend.magnitude:,.4g}: the sum has steps of {step:g} in {fmt.name}, "
            "in which what it is added to is lost",
            number=step,
        )
    return None


def _long_recurrence(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    steps, last = walk.chains.get(node.name, (0, ""))
    if steps < _LONG_CHAIN:
        return None
    return Match(
        nodes=(node,),
        detail=f"a state is decayed and added to {steps:,} times: in {fmt.name} decays above "
        f"1 - {fmt.unit_roundoff / 2:.2g} are 1, and additions below {fmt.unit_roundoff:.2g} of the state are lost",
        number=steps,
        evidence={"at": str(walk.graph[last].site)},
    )


PATTERNS = (
    Pattern(
        code=ReasonCode.POSITIONS_COLLIDE, ops=_ARITHMETIC, match=_positions_collide,
        cure="count in int64: cumsum(-1, dtype=torch.long)",
    ),
    Pattern(
        code=ReasonCode.PHASE_LOST, ops=("sin", "cos"), match=_phase_lost,
        cure="keep positions, frequencies and their product in FP32 up to sin and cos",
    ),
    Pattern(
        code=ReasonCode.LARGE_ADDEND, ops=("add", "sub"), match=_large_addend,
        cure="use relative positions, so that the term is small where it matters, or keep the sum in FP32",
    ),
    Pattern(
        code=ReasonCode.LONG_RECURRENCE, ops=("mul", "add", "addcmul", "lerp"), match=_long_recurrence,
        cure="keep the state in FP32 and cast what leaves it",
    ),
)  # fmt: skip
