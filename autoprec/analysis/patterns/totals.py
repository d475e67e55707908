"""Patterns around sums, products of matrices, divisions and what the range of a format cannot hold."""

import math

from autoprec.analysis.marks import ReasonCode
from autoprec.analysis.patterns.probabilities import vanishes_below
from autoprec.analysis.patterns.row import Match, Pattern, is_short
from autoprec.analysis.patterns.walk import Walk, contraction, num_reduced
from autoprec.graph.opgraph import OpNode
from autoprec.numerics import Format, ulp

PRODUCTS = ("matmul", "mm", "bmm", "mv", "dot", "einsum", "baddbmm", "inner")
_SCATTERS = ("index_add", "scatter_add", "index_put", "scatter_reduce")
_MEAN_LOSSES = ("cross_entropy", "nll_loss")
_LONG = 512  # products that are never negative add up from about here
_READERS = (*PRODUCTS, "linear", "addmm", "conv1d", "conv2d", "conv3d")
_POINTWISE = ("add", "sub", "mul", "div", "maximum", "addcmul", "sum", "prod", "outer", "pow", "square", "cumsum")


def _scale(walk: Walk, node: OpNode) -> tuple[OpNode, float] | None:
    """Return what `node` scales down and by which factor below one; None if it does not."""
    if node.op == "div":
        divisor, value = walk.number(node, 1), walk.operand(node, 0, "input")
        return (value, 1 / divisor) if value is not None and divisor is not None and abs(divisor) > 1 else None
    for place, factor in ((0, 1), (1, 0)):
        number, value = walk.number(node, factor), walk.operand(node, place)
        if number is not None and value is not None and 0 < abs(number) < 1:
            return value, number
    return None


def _scale_after_product(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    scaled = _scale(walk, node)
    if scaled is None or scaled[0].op not in PRODUCTS or not is_short(fmt):
        return None
    product, factor = scaled
    length = contraction(product)
    limit = math.sqrt(fmt.max / length)
    if walk.ranges[product.name].magnitude <= fmt.max:
        return None
    return Match(
        nodes=(product, node),
        detail=f"a product over {length:,} terms is scaled by {factor:.3g} only afterwards: it overflows {fmt.name} "
        f"once its factors average {limit:.3g}",
        number=limit,
    )


def _scale_after_sum(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    scaled = _scale(walk, node)
    if scaled is None or scaled[0].op not in ("sum", "cumsum") or not is_short(fmt):
        return None
    total, _ = scaled
    length = num_reduced(total)
    if length < 2 or walk.ranges[total.name].magnitude <= fmt.max:
        return None
    return Match(
        nodes=(total, node),
        detail=f"a sum of {length:,} values is divided only afterwards: it overflows {fmt.name} once they average "
        f"{fmt.max / length:.3g}",
        number=fmt.max / length,
    )


def _long_sum(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    length, top = num_reduced(node), walk.interval(node, 0, "input").magnitude
    if not is_short(fmt) or not top < math.inf or length * top <= fmt.max or length < 2 or top > fmt.max:
        return None
    return Match(
        nodes=(node,),
        detail=f"a sum of {length:,} values of up to {top:.3g} may reach {length * top:.3g}, "
        f"and {fmt.name} ends at {fmt.max:g}",
        number=length * top,
    )


def _long_loss(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    shape = walk.shape(node, 0, "input")
    if len(shape) < 2 or not is_short(fmt) or node.kwargs.get("reduction", "mean") == "none" or shape[1] < 2:
        return None
    rows, guess = math.prod(shape) // shape[1], math.log(shape[1])
    if rows * guess <= fmt.max:
        return None
    return Match(
        nodes=(node,),
        detail=f"the mean of {rows:,} losses is their sum first: at log({shape[1]:,}) = {guess:.2f} each, what a guess "
        f"costs, it is {rows * guess:.3g}, and {fmt.name} ends at {fmt.max:g}",
        number=rows * guess,
    )


def _long_product(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    length = contraction(node)
    if not is_short(fmt) or length < _LONG or walk.interval(node, 0, "input").lo < 0 or walk.interval(node, 1).lo < 0:
        return None
    return Match(
        nodes=(node,),
        detail=f"sums {length:,} products that are never negative: it overflows {fmt.name} once they average "
        f"{fmt.max / length:.3g}",
        number=fmt.max / length,
    )


def _running_sum(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    if node.op == "index_put" and not (node.kwargs.get("accumulate") or True in node.args[3:]):
        return None
    if node.op == "cumsum":
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        shape = walk.shape(node, 0, "input")
        length = shape[dim] if isinstance(dim, int) and -len(shape) <= dim < len(shape) else 1
    else:
        index = [meta.numel for meta in node.inputs if meta.dtype.startswith("int")]
        length = max(index, default=1)
    if length <= fmt.max_exact_integer:
        return None
    return Match(
        nodes=(node,),
        detail=f"{node.op} adds up to {length:,} terms one by one: in {fmt.name} equal terms stall at "
        f"{fmt.max_exact_integer:,} of them",
        number=length,
    )


def _divisor_near_zero(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    place = 1 if node.op == "div" else 0
    least, limit = walk.interval(node, place).lo, vanishes_below(fmt)
    divisor = walk.operand(node, place)
    if divisor is None or not is_short(fmt) or not 0 <= least <= limit:
        return None
    inner = walk.unguarded(divisor)
    return Match(
        nodes=(inner.value, *inner.guards, node),
        detail=f"divides by numbers from {least:.3g} on: what is below {limit:.2g} is 0 in {fmt.name}",
        number=limit,
        evidence={"least": least},
    )


def _root_near_zero(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    least, limit = walk.interval(node, 0, "input").lo, vanishes_below(fmt)
    if not is_short(fmt) or not 0 <= least <= limit:
        return None
    inner = walk.unguarded(walk.operand(node, 0, "input"))
    return Match(
        nodes=(inner.value, *inner.guards, node),
        detail=f"a root of numbers from {least:.3g} on: what is below {limit:.2g} is 0 in {fmt.name}, "
        "where its slope is infinite",
        number=limit,
        evidence={"least": least},
    )


def _range_overflows(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    """Tell of the first call that may pass the format's range, if what it reads is within."""
    if not is_short(fmt):
        return None
    read = [walk.interval(node, place) for place in range(min(len(node.args), 2))]
    tight = [each for each in read if each.is_tight and each.is_finite and each.magnitude > fmt.max]
    result = walk.ranges[node.name]
    if tight:
        top = max(each.magnitude for each in tight)
        detail = f"reads numbers of up to {top:.3g}, and {fmt.name} ends at {fmt.max:g}"
        return Match(nodes=(node,), detail=detail, number=top)
    top = result.magnitude
    if node.op in _READERS:  # a bound on a sum of products is too wide to tell
        return None
    if not fmt.max < top < math.inf or any(each.magnitude > fmt.max for each in read):
        return None
    return Match(nodes=(node,), detail=f"may reach {top:.3g}, and {fmt.name} ends at {fmt.max:g}", number=top)


def _added_to_limit(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    half_step = ulp(fmt.max, fmt) / 2
    for place, other in ((0, 1), (1, 0)):
        mask, score = walk.interval(node, place), walk.interval(node, other)
        if -fmt.max <= mask.lo <= half_step - fmt.max and score.lo < -half_step:
            return Match(
                nodes=(node,),
                detail=f"adds to {mask.lo:g}, where {fmt.name} ends: with a score of {-half_step:g} or less it is -inf",
                number=half_step,
            )
    return None


PATTERNS = (
    Pattern(
        code=ReasonCode.SCALE_AFTER_PRODUCT, ops=("mul", "div"), match=_scale_after_product,
        cure="scale one factor before the product, as in (q * d ** -0.5) @ k.T",
    ),
    Pattern(
        code=ReasonCode.SCALE_AFTER_SUM, ops=("mul", "div"), match=_scale_after_sum,
        cure="take the mean, or scale the terms before they are summed",
    ),
    Pattern(
        code=ReasonCode.LONG_SUM, ops=("sum", "nansum"), match=_long_sum,
        cure="sum with dtype=torch.float32, or take the mean",
    ),
    Pattern(
        code=ReasonCode.LONG_SUM, ops=_MEAN_LOSSES, match=_long_loss,
        cure="give the loss FP32 logits: logits.float()",
    ),
    Pattern(
        code=ReasonCode.LONG_PRODUCT, ops=PRODUCTS, match=_long_product,
        cure="divide one factor by the number of terms before the product",
    ),
    Pattern(
        code=ReasonCode.RUNNING_SUM, ops=("cumsum", *_SCATTERS), match=_running_sum,
        cure="accumulate in FP32: dtype=torch.float32, or an FP32 target",
    ),
    Pattern(
        code=ReasonCode.DIVISOR_NEAR_ZERO, ops=("div", "reciprocal", "rsqrt"), match=_divisor_near_zero,
        cure="use an eps that the format holds (1e-4 in fp16)",
    ),
    Pattern(
        code=ReasonCode.ROOT_NEAR_ZERO, ops=("sqrt",), match=_root_near_zero,
        cure="add an eps that the format holds (1e-4 in fp16) under the root",
    ),
    Pattern(
        code=ReasonCode.RANGE_OVERFLOWS, ops=(*_POINTWISE, *_READERS), match=_range_overflows,
        cure="compute in a smaller unit, such as fractions of the image instead of pixels",
    ),
    Pattern(
        code=ReasonCode.ADDED_TO_LIMIT, ops=("add",), match=_added_to_limit,
        cure="mask with masked_fill(mask, -inf), or with half of torch.finfo(x.dtype).min",
    ),
)  # fmt: skip
