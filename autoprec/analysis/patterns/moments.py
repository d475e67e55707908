"""Patterns around squares, means of squares and differences: norms written out, variances, cancellation."""

import math

from autoprec.analysis.marks import ReasonCode
from autoprec.analysis.patterns.probabilities import vanishes_below
from autoprec.analysis.patterns.row import Match, Pattern, is_short
from autoprec.analysis.patterns.walk import Walk, num_reduced
from autoprec.graph.opgraph import OpNode
from autoprec.numerics import Format, ulp

_VARIANCES = ("var", "var_mean", "std", "std_mean")
_NORMS = ("layer_norm", "rms_norm", "group_norm", "native_layer_norm")
_NEAR = 8  # steps of a format: two numbers nearer than that keep at most three bits of their difference


def _decomposed_norm(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    if node.op == "pow" and abs(walk.number(node, 1, "exponent") or 0) != 0.5:
        return None
    inner = walk.unguarded(walk.operand(node, 0, "input"))
    mean = inner.value
    if mean is None:
        return None
    if mean.op in ("var", "var_mean"):
        return _written_out(walk, (mean, *inner.guards, node), mean, num_terms=1, fmt=fmt)
    square = walk.operand(mean, 0, "input") if mean.op == "sum" else walk.averaged(mean)
    if square is None or walk.squared(square) is None:
        return None
    terms = num_reduced(mean) if mean.op == "sum" else 1
    return _written_out(walk, (square, mean, *inner.guards, node), square, num_terms=terms, fmt=fmt)


def _written_out(walk: Walk, nodes: tuple[OpNode, ...], square: OpNode, *, num_terms: int, fmt: Format) -> Match | None:
    limit = math.sqrt(fmt.max / max(num_terms, 1))
    if is_short(fmt):
        if walk.interval(square, 0, "input").magnitude <= limit and walk.interval(square, 0, "input").lo > 0:
            return None
        what = "the sum of squares" if num_terms > 1 else "a square"
        least = math.sqrt(vanishes_below(fmt))
        detail = (
            f"a norm written out: {what} overflows {fmt.name} above |x| = {limit:.4g} and is 0 below {least:.2g}, "
            "where a fused norm is neither"
        )
        return Match(nodes=nodes, detail=detail, number=limit)
    detail = f"a norm written out: its statistics keep {fmt.precision} bits in {fmt.name}, those of a fused norm 24"
    return Match(nodes=nodes, detail=detail, number=fmt.precision)


def _product_squared(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    base = walk.squared(node)
    limit = math.sqrt(fmt.max)
    if base is None or not is_short(fmt) or walk.interval(node, 0, "input").magnitude <= limit:
        return None
    return Match(nodes=(node,), detail=f"the square overflows {fmt.name} above |x| = {limit:.1f}", number=limit)


def _variance_of_moments(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    first, second = walk.operands(node)
    product = walk.averaged(first)
    if first is None or second is None or product is None or not _is_product(walk, product):
        return None
    if not _is_product(walk, second):
        return None
    means = [each for each in walk.operands(second)[: 1 if second.op in ("pow", "square") else 2] if each is not None]
    if not means or any(walk.averaged(mean) is None for mean in means):
        return None
    share = 2 * fmt.unit_roundoff
    return Match(
        nodes=(product, first, *means, second, node),
        detail=f"E[x^2] - E[x]^2: a variance below {share:.2g} of the squared mean is mere rounding in {fmt.name}",
        number=share,
    )


def _is_product(walk: Walk, node: OpNode) -> bool:
    return walk.squared(node) is not None or (
        node.op == "mul" and all(each is not None for each in walk.operands(node))
    )


def _nearly_equal(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    a = walk.interval(node, 0, "input")
    b = walk.interval(node, 1) if node.op == "sub" else a
    if not (a.is_finite and b.is_finite) or a.lo * b.lo <= 0 or a.hi * b.hi <= 0:
        return None
    if node.op == "sub" and None in walk.operands(node):
        return None
    size = min(abs(a.lo), abs(a.hi), abs(b.lo), abs(b.hi))
    largest, step = max(abs(a.hi - b.lo), abs(b.hi - a.lo)), ulp(size, fmt)
    if largest >= _NEAR * step:
        return None
    return Match(
        nodes=(node,),
        detail=f"differences of at most {largest:.2g} between numbers of {size:.3g}, held in steps of {step:.2g} in "
        f"{fmt.name}",
        number=step,
    )


def _norm_backward(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    """Tell of kernels that sum over rows in the dtype of the activation, as layer norm does on CPU in torch 2.13."""
    shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape", ())
    sizes = shape if isinstance(shape, tuple) else (shape,)
    if walk.device_kind != "cpu" or not node.inputs or not all(isinstance(size, int) for size in sizes):
        return None
    rows = node.inputs[0].numel // max(math.prod(sizes), 1)
    if rows < 4 * fmt.max_exact_integer:
        return None
    return Match(
        nodes=(node,),
        detail=f"on CPU the gradient of its bias sums {rows:,} rows in {fmt.name}, where equal terms stall at "
        f"{fmt.max_exact_integer:,}",
        number=rows,
    )


PATTERNS = (
    Pattern(
        code=ReasonCode.DECOMPOSED_NORM, ops=("rsqrt", "sqrt", "pow"), match=_decomposed_norm,
        cure="use torch.nn.functional.rms_norm or layer_norm, whose kernels square in FP32",
    ),
    Pattern(
        code=ReasonCode.PRODUCT_SQUARED, ops=("mul", "square", "pow"), match=_product_squared,
        cure="scale the input down before it is squared",
    ),
    Pattern(
        code=ReasonCode.VARIANCE_OF_MOMENTS, ops=("sub",), match=_variance_of_moments,
        cure="subtract the mean first and average the squares of what is left",
    ),
    Pattern(
        code=ReasonCode.NEARLY_EQUAL, ops=("sub", *_VARIANCES), match=_nearly_equal,
        cure="subtract in FP32 what is known to be common to both before rounding",
    ),
    Pattern(
        code=ReasonCode.NORM_BACKWARD, ops=("layer_norm",), match=_norm_backward,
        cure="run this norm in FP32 on CPU",
    ),
)  # fmt: skip
