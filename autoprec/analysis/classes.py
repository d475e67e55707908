"""Verdicts from the class of each op alone: what is FP32 by default, and what that default spreads to."""

import math
from collections.abc import Iterable, Sequence

from autoprec.analysis.marks import VERDICTS, Mark, Reason, ReasonCode, Verdict
from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.propagate import NumericsClass, Paint, paint
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS, Format, format_named, ulp
from autoprec.ops import Op, lookup


def static_marks(op_graph: OpGraph, formats: Sequence[str], device_kind: str) -> tuple[Mark, ...]:
    """Return one mark for each site and each of `formats`, in order of first execution.

    `prefer` for deny ops, for what they contaminate and for ops the catalog does not know; else `free`. A site that
    several calls of its module share gets the strongest verdict of these calls.
    """
    painted = paint(op_graph.digraph, numerics_classes(op_graph))
    calls: dict[Site, list[OpNode]] = {}
    for node in op_graph.calls():
        if node.site is not None:
            calls.setdefault(node.site, []).append(node)
    lows = [format_named(name) for name in formats]
    return tuple(
        _mark(site, low, nodes, painted, op_graph, device_kind) for site, nodes in calls.items() for low in lows
    )


def numerics_classes(op_graph: OpGraph) -> dict[str, NumericsClass]:
    """Return the numerics class of every node that computes floating-point values which a policy may round.

    Ops on integers carry no rounding, and calls that are left alone are FP32 whatever the policy: both end a spread.
    A call that writes to an argument is in that argument's format, whatever its op: it passes a spread on.
    """
    return {
        node.name: "clear" if node.writes else lookup(node.op).numerics
        for node in op_graph
        if node.kind == "op" and not node.left_alone and any(meta.is_floating for meta in node.outputs)
    }


def _mark(
    site: Site, low: Format, nodes: Sequence[OpNode], painted: dict[str, Paint], op_graph: OpGraph, device_kind: str
) -> Mark:
    verdict, reason = max(
        (_judge(node, low, painted, op_graph, device_kind) for node in nodes),
        key=lambda judged: VERDICTS.index(judged[0]),
    )
    return Mark(site=site, format=low.name, verdict=verdict, reasons=() if reason is None else (reason,))


def _judge(
    node: OpNode, low: Format, painted: dict[str, Paint], op_graph: OpGraph, device_kind: str
) -> tuple[Verdict, Reason | None]:
    if node.left_alone:
        detail = "runs under no_grad inside the model, so no policy casts it"
        return "free", Reason(code=ReasonCode.LEFT_ALONE, detail=detail)
    if node.writes:
        detail = "writes to an argument, so it computes in that argument's format"
        return "free", Reason(code=ReasonCode.LEFT_ALONE, detail=detail)
    op = lookup(node.op)
    if op.family == "unknown":
        detail = f'the catalog has no op "{node.op}" ({_num_values(node):,} values)'
        return "prefer", Reason(
            code=ReasonCode.UNKNOWN_OP, detail=detail, evidence={"op": node.op, "num_values": _num_values(node)}
        )
    each = painted.get(node.name)
    if each is None or not each.origin:
        return "free", None
    if each.origin == node.name:
        return "prefer", _deny_reason(node, op, low, device_kind)
    return "prefer", _contaminated_reason(op_graph[each.origin], each.distance)


def _contaminated_reason(origin: OpNode, distance: int) -> Reason:
    where = str(origin.site) if origin.site is not None else origin.name
    steps = "directly" if distance == 1 else f"{distance} ops later"
    return Reason(
        code=ReasonCode.CONTAMINATED,
        detail=f"reads the result of {where} {steps}, which is FP32 by default",
        evidence={"origin": where, "distance": distance},
    )


def _deny_reason(node: OpNode, op: Op, low: Format, device_kind: str) -> Reason:
    length = reduction_length(node)
    return Reason(
        code=ReasonCode.DENY_OP,
        detail=_sentence(node, op, low, length),
        evidence={
            "numerics": op.numerics,
            "family": op.family,
            "num_values": _num_values(node),
            "reduction_length": length,
            "autocast": op.autocast.get(device_kind, "none"),
        },
    )


def reduction_length(node: OpNode) -> int:
    """Return how many values of the largest input one value of the largest output is made of, rounded down."""
    return max(_num_values(node) // max(_largest(meta.numel for meta in node.outputs), 1), 1)


def _num_values(node: OpNode) -> int:
    return _largest(meta.numel for meta in (node.inputs or node.outputs) if meta.is_floating)


def _largest(numbers: Iterable[int]) -> int:
    return max(numbers, default=0)


# Ops that add up: their results overflow a short range, and keep few digits in a short significand.
_SUMS = frozenset({"sum", "nansum", "trace", "cumsum", "index_add", "scatter_add", "scatter_reduce", "sum_to_size"})
_EXPONENTIALS = frozenset({"exp", "expm1", "sinh", "cosh", "logsumexp"})
_NORMS = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "normalize", "hypot"})
_SQUARES = _NORMS | {"square", "var", "std", "var_mean", "std_mean", "mse_loss", "cdist", "pairwise_distance"}
_ANGLES = frozenset({"sin", "cos", "tan"})


def _sentence(node: OpNode, op: Op, low: Format, length: int) -> str:
    """Return why `op` is FP32 by default, with the number of `low` or of the shapes that matters most."""
    name, short = low.name, low.exponent_bits < FORMATS["fp32"].exponent_bits
    values = f"{_num_values(node):,} values"
    if op.name in _ANGLES:
        return f"near an angle of 1000 {name} steps by {ulp(1000.0, low):g} rad ({values})"
    if op.name in _EXPONENTIALS and short:
        return f"exp overflows {name} above {math.log(low.max):.1f} ({values})"
    if op.name in _EXPONENTIALS:
        return f"an input near 10 is rounded by up to {ulp(10.0, low) / 2:g}, which exp turns into a factor ({values})"
    exponent = max(node.constants, default=0) if op.name == "pow" else 0
    if exponent > 1 and short:
        return f"x ** {exponent:g} overflows {name} above {low.max ** (1 / exponent):.1f} ({values})"
    if op.name in _SQUARES and short:
        return f"squares overflow {name} above {math.sqrt(low.max):.1f} ({values})"
    if op.name in _SUMS and short and length > 1:
        return f"a sum of {length:,} values overflows {name} once they average {low.max / length:.3g}"
    if length > 1:
        return f"makes one result of {length:,} values, with {low.precision} significant bits in {name}"
    return f"{op.name} of {values}, with {low.precision} significant bits in {name}"
