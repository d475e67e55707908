"""Patterns around exp, log, softmax and sigmoid."""

import math

from autoprec.analysis.marks import ReasonCode
from autoprec.analysis.patterns.row import Match, Pattern, is_short
from autoprec.analysis.patterns.walk import Walk
from autoprec.graph.opgraph import OpNode
from autoprec.numerics import Format, round_scalar

LOGS = ("log", "log2", "log10")
_SOFTMAXES = ("softmax", "softmin")
_UNIFORM = ("rand", "rand_like", "uniform")
_NATURAL = {"exp": 1.0, "expm1": 1.0, "exp2": math.log(2), "sinh": 1.0, "cosh": 1.0}


def vanishes_below(fmt: Format) -> float:
    """Return the positive number up to which everything rounds to zero."""
    return fmt.min_subnormal / 2


def one_above(fmt: Format) -> float:
    """Return the logit above which a sigmoid rounds to one."""
    return -math.log(fmt.unit_roundoff / 2)


def _softmax_then_log(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    inner = walk.unguarded(walk.operand(node, 0, "input"))
    if inner.value is None or inner.value.op not in _SOFTMAXES:
        return None
    gap = -math.log(vanishes_below(fmt))
    return Match(
        nodes=(inner.value, *inner.guards, node),
        detail=f"log of a softmax: a class whose logit trails by {gap:.1f} has probability 0 in {fmt.name}, "
        "and log 0 is -inf",
        number=gap,
    )


def _sigmoid_then_log(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    inner = walk.unguarded(walk.operand(node, 0, "input"))
    value, between = inner.value, [*inner.guards]
    if node.op == "log1p" and value is not None and value.op == "neg":
        between.append(value)
        inner = walk.unguarded(walk.operand(value, 0, "input"))
        value = inner.value
        between += inner.guards
    elif value is not None and value.op == "sub" and walk.number(value, 0, "input") == 1:
        between.append(value)
        inner = walk.unguarded(walk.operand(value, 1))
        value = inner.value
        between += inner.guards
    if value is None or value.op != "sigmoid":
        return None
    logit = one_above(fmt)
    what = "binary cross entropy" if node.op == "binary_cross_entropy" else "log"
    return Match(
        nodes=(value, *between, node),
        detail=f"{what} of a sigmoid: logits above {logit:.1f} give exactly 1 in {fmt.name}, "
        "and log(1 - 1) is -inf or clamped",
        number=logit,
    )


def _one_minus_probability(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    base = walk.operand(node, 0, "input")
    if base is None or base.op != "sub" or walk.number(base, 0, "input") != 1:
        return None
    inner = walk.unguarded(walk.operand(base, 1))
    if inner.value is None or inner.value.op not in ("sigmoid", *_SOFTMAXES):
        return None
    logit = one_above(fmt)
    return Match(
        nodes=(inner.value, base, node),
        detail=f"1 - {inner.value.op}, then {node.op}: above a logit of {logit:.1f} the difference is 0 in {fmt.name}",
        number=logit,
    )


def _log_sum_exp(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    inner = walk.unguarded(walk.operand(node, 0, "input"))
    total = inner.value
    if total is None or total.op != "sum":
        return None
    masked = walk.operand(total, 0, "input")
    power = masked
    if masked is not None and masked.op in ("mul", "masked_fill", "where"):
        power = next((each for each in _operands(walk, masked) if each is not None and each.op == "exp"), None)
    if power is None or power.op != "exp" or is_shifted(walk, power):
        return None
    limit = math.log(fmt.max)
    return Match(
        nodes=(power, masked, total, *inner.guards, node),
        detail=f"log of a sum of exp: exp overflows {fmt.name} above {limit:.1f}, and what trails by as much is lost",
        number=limit,
    )


def _operands(walk: Walk, node: OpNode) -> list[OpNode | None]:
    return [walk.operand(node, place) for place in range(len(node.args))]


def is_shifted(walk: Walk, node: OpNode) -> bool:
    """Return whether the argument of `node` is a value minus its maximum, its sum of exponentials, or is never > 0."""
    if walk.interval(node, 0, "input").hi <= 0:
        return True
    shifted = walk.operand(node, 0, "input")
    if shifted is None or shifted.op != "sub":
        return shifted is not None and shifted.op in ("log_softmax", "log_sigmoid")
    value, top = walk.operands(shifted)
    if top is None or top.op not in ("amax", "max", "logsumexp", "cummax", "maximum"):
        return False
    return value in (walk.operand(top, 0, "input"), walk.operand(top, 1))


def _log_of_uniform(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    inner = walk.unguarded(walk.operand(node, 0, "input"))
    if inner.value is None or inner.value.op not in _UNIFORM:
        return None
    share = fmt.unit_roundoff / 2
    return Match(
        nodes=(*inner.guards, node),
        detail=f"log of uniform random numbers: {share:.1g} of them round to 1 in {fmt.name}, whose log is 0",
        number=share,
    )


def _log_near_zero(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    inner = walk.unguarded(walk.operand(node, 0, "input"))
    least, limit = walk.interval(node, 0, "input").lo, vanishes_below(fmt)
    if not is_short(fmt) or not 0 <= least <= limit:
        return None
    return Match(
        nodes=(inner.value, *inner.guards, node),
        detail=f"log of numbers from {least:.3g} on: what is below {limit:.2g} is 0 in {fmt.name}, and log 0 is -inf",
        number=limit,
        evidence={"least": least},
    )


def _exp_overflows(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    limit = math.log(fmt.max) / _NATURAL[node.op]
    top = walk.interval(node, 0, "input").hi
    if not is_short(fmt) or top <= limit or is_shifted(walk, node):
        return None
    known = f"its argument may reach {top:.3g}" if top < math.inf else "nothing bounds its argument"
    return Match(
        nodes=(node,),
        detail=f"{node.op} overflows {fmt.name} above {limit:.1f}, and {known}",
        number=limit,
        evidence={"bound": top if top < math.inf else "none"},
    )


def _exp_of_difference(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    difference = walk.operand(node, 0, "input")
    if difference is None or difference.op != "sub":
        return None
    sums = [each for each in walk.operands(difference) if each is not None and each.op == "cumsum"]
    if len(sums) < 2:
        return None
    size = max(node.inputs[0].shape, default=1) if node.inputs else 1
    return Match(
        nodes=(*sums, difference, node),
        detail=f"exp of differences of running sums: near a sum of {size:,} they are off by up to "
        f"{size * fmt.unit_roundoff:.2g} in {fmt.name}, which exp turns into a factor",
        number=size * fmt.unit_roundoff,
    )


def _rounds_to_one(walk: Walk, node: OpNode, fmt: Format) -> Match | None:
    result = walk.ranges[node.name]
    if not result.lo > 0.5 or not result.hi < 1 or round_scalar(result.hi, fmt) != 1:
        return None
    return Match(
        nodes=(node,),
        detail=f"factors of up to 1 - {1 - result.hi:.2g} become 1 in {fmt.name}, with a spacing of {fmt.eps / 2:.2g}",
        number=1 - result.hi,
    )


PATTERNS = (
    Pattern(
        code=ReasonCode.SOFTMAX_THEN_LOG, ops=LOGS, match=_softmax_then_log,
        cure="use log_softmax, which keeps the gap between logits",
    ),
    Pattern(
        code=ReasonCode.SIGMOID_THEN_LOG, ops=(*LOGS, "log1p", "binary_cross_entropy"), match=_sigmoid_then_log,
        cure="use binary_cross_entropy_with_logits, or logsigmoid(x) and logsigmoid(-x)",
    ),
    Pattern(
        code=ReasonCode.ONE_MINUS_PROBABILITY, ops=("pow", "square", "div", "reciprocal"), match=_one_minus_probability,
        cure="compute 1 - sigmoid(x) as sigmoid(-x)",
    ),
    Pattern(
        code=ReasonCode.LOG_SUM_EXP, ops=LOGS, match=_log_sum_exp,
        cure="use torch.logsumexp, which takes out the maximum first",
    ),
    Pattern(
        code=ReasonCode.LOG_OF_UNIFORM, ops=LOGS, match=_log_of_uniform,
        cure="draw the noise in FP32, as -log of torch.empty_like(x, dtype=torch.float32).exponential_()",
    ),
    Pattern(
        code=ReasonCode.LOG_NEAR_ZERO, ops=LOGS, match=_log_near_zero,
        cure="compute the logarithm from logits, or clamp to an eps that the format holds",
    ),
    Pattern(
        code=ReasonCode.EXP_OVERFLOWS, ops=tuple(_NATURAL), match=_exp_overflows,
        cure="subtract the maximum first, or stay in the logarithm with logsumexp",
    ),
    Pattern(
        code=ReasonCode.EXP_OF_DIFFERENCE, ops=("exp",), match=_exp_of_difference,
        cure="keep the running sum in FP32 up to the difference",
    ),
    Pattern(
        code=ReasonCode.ROUNDS_TO_ONE, ops=("exp", "sigmoid", "sub", "clamp", "mul"), match=_rounds_to_one,
        cure="keep the factor in FP32, or store its distance from one",
    ),
)  # fmt: skip
