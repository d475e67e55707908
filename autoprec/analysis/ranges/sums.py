"""Range rules of ops that add up: reductions, scans, products of matrices."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autoprec.analysis.ranges.interval import (
    INF,
    TOP,
    Interval,
    add,
    grown,
    hull,
    multiply,
    point,
    signed_like,
    sum_error,
)
from autoprec.analysis.ranges.reading import Reading, Rule, Shape

_ZERO, _ONE = point(0.0), point(1.0)
_FRACTION = Interval(0.0, 1.0)
_EXACT = 2.0**24  # up to which float32 holds every integer


def many(one: Interval, count: int, dtype: str) -> Interval:
    """Return the interval of sums of `count` numbers in `one`, computed in `dtype` in any order."""
    if count == 0:
        return _ZERO
    total = replace(multiply(one, point(float(count))), is_integer=one.is_integer, is_tight=False)
    if dtype.startswith(("int", "uint")) or (one.is_integer and total.magnitude <= _EXACT and is_wide(dtype)):
        return total  # every partial sum is exact
    sums = signed_like(grown(total, sum_error(count, total.magnitude, dtype)), one)
    if one.lo >= 0 and one.hi.is_integer() and total.hi <= _EXACT and is_wide(dtype):
        return replace(sums, hi=total.hi)  # no partial sum is rounded up beyond as many times the largest term
    return sums


def is_wide(dtype: str) -> bool:
    """Return whether a dtype holds integers and sums of any ordinary length exactly enough."""
    return dtype in ("float32", "float64")


def dtype_of(call: Reading) -> str:
    """Return the dtype of the first result, or nothing."""
    return call.node.outputs[0].dtype if call.node.outputs else ""


def _sum(call: Reading) -> Interval:
    count = call.num_reduced()
    return TOP if count is None else many(call.interval(0), count, dtype_of(call))


def _mean(call: Reading) -> Interval:
    count, a = call.num_reduced(), call.interval(0)
    if not count:
        return TOP
    return averages(a, sum_error(count + 1, a.magnitude, dtype_of(call)))


def averages(a: Interval, error: float) -> Interval:
    """Return the interval of means of elements of `a`, computed with that error."""
    return signed_like(grown(replace(a, is_integer=False, is_tight=False), error), a)


def _cumulated(call: Reading) -> Interval:
    a, size = call.interval(0), call.size(0, "input", call.value(1, "dim"))
    if size is None or not size:
        return TOP
    total = many(a, size, dtype_of(call))
    constant = a.is_tight and a.lo == a.hi  # as a running count of ones
    return replace(hull((a, total)), is_tight=constant)


def _multiplied(call: Reading) -> Interval:
    a = call.interval(0)
    if not (a.lo >= -1 and a.hi <= 1):
        return TOP
    return Interval(0.0 if a.lo >= 0 else -1.0, 1.0, is_integer=a.is_integer)


def _extreme(call: Reading) -> Interval | tuple[Interval, ...]:
    """Return the interval of `amax(x)`, `max(x)`, `max(x, dim)` and `max(x, y)`."""
    if len(call.node.outputs) > 1:
        return _with_indices(call)
    other = call.value(1, "other", None)
    both = other is not None and not isinstance(other, int | tuple)
    return hull((call.interval(0), call.interval(1, "other"))).loose() if both else call.interval(0).loose()


def _with_indices(call: Reading) -> tuple[Interval, ...]:
    shape = call.shape(0)
    return (call.interval(0).loose(), index_below(max(shape or (1,)) if shape is not None else None))


def _index(call: Reading) -> Interval:
    shape = call.shape(0)
    return index_below(math.prod(shape) if shape is not None else None)


def index_below(count: int | None) -> Interval:
    """Return the interval of indices into so many elements."""
    return Interval(0.0, max(count - 1, 0) if count is not None else INF, is_integer=True, is_number=True)


def _counted(call: Reading) -> Interval:
    shape = call.shape(0)
    return Interval(0.0, float(math.prod(shape)), is_integer=True, is_number=True) if shape is not None else TOP


def _variance(call: Reading) -> Interval:
    a, count = call.interval(0), call.num_reduced()
    plain = "correction" not in call.node.kwargs and count is not None and count > 1 and a.is_finite
    high = (a.hi - a.lo) ** 2 if plain else INF  # at most half of it, and half more for rounding
    return Interval(0.0, high)


def _deviation(call: Reading) -> Interval:
    return Interval(0.0, math.sqrt(_variance(call).hi))


def _variance_and_mean(call: Reading) -> tuple[Interval, ...]:
    return (_variance(call), _mean(call))


def _deviation_and_mean(call: Reading) -> tuple[Interval, ...]:
    return (_deviation(call), _mean(call))


def _log_sum_exp(call: Reading) -> Interval:
    a = call.interval(0)
    count = call.num_reduced() if call.node.op == "logsumexp" else call.size(0, "input", call.value(1, "dim"))
    if not count:
        return TOP
    return grown(Interval(a.lo, a.hi + math.log(count)), 1e-2 + sum_error(8, a.magnitude, dtype_of(call)))


def _log_softmax(call: Reading) -> Interval:
    a = call.interval(0)
    if not a.is_finite:
        return Interval(-INF, 0.0)
    spread = a.hi - a.lo + math.log(max(*(call.shape(0) or ()), 1, 1))
    return Interval(-spread - sum_error(8, spread + a.magnitude, dtype_of(call)), 0.0)


# Products of matrices


def _matmul(call: Reading) -> Interval:
    left, right = call.shape(0), call.shape(1, "other")
    if not left or not right:
        return TOP
    if left[-1] == 1 and 1 in (math.prod(left[:-2]), math.prod(right[:-2])):
        return multiply(call.interval(0), call.interval(1, "other"), is_outer=True)
    return many(multiply(call.interval(0), call.interval(1, "other")).loose(), left[-1], dtype_of(call))


def _linear(call: Reading) -> Interval:
    size = call.size(0, "input", -1)
    if size is None:
        return TOP
    product = many(multiply(call.interval(0), call.interval(1, "weight")).loose(), size, dtype_of(call))
    return _with_bias(product, call.interval(2, "bias", _ZERO), size, dtype_of(call))


def _with_bias(product: Interval, bias: Interval, size: int, dtype: str) -> Interval:
    if bias == _ZERO:
        return product
    total = add(product, bias).loose()
    return grown(total, sum_error(size + 2, product.magnitude + bias.magnitude, dtype))


def _added_product(call: Reading) -> Interval:
    """Return the interval of `beta * input + alpha * (a @ b)`."""
    left = call.shape(1, "mat1")
    if not left:
        return TOP
    count = left[-1] * (left[0] if call.node.op == "addbmm" else 1)
    product = many(multiply(call.interval(1), call.interval(2)).loose(), count, dtype_of(call))
    scaled = multiply(product, call.interval(9, "alpha", _ONE))
    return _with_bias(scaled, multiply(call.interval(0), call.interval(9, "beta", _ONE)), count, dtype_of(call))


def _convolution(call: Reading) -> Interval:
    weight = call.shape(1, "weight")
    if not weight or any(isinstance(value, str) and value not in ("same", "valid") for value in call.given()):
        return TOP
    count = math.prod(weight[1:])
    if call.node.op.startswith("conv_transpose"):
        count = math.prod(weight) // max(weight[1], 1)
    one = hull((multiply(call.interval(0), call.interval(1, "weight")), _ZERO)).loose()
    product = many(one, count, dtype_of(call))
    if product.is_finite:  # algorithms that transform their input (Winograd) have larger errors, of either sign
        product = grown(product, 16 * sum_error(count, product.magnitude, dtype_of(call)))
    return _with_bias(product, call.interval(2, "bias", _ZERO), count, dtype_of(call))


def _outer(call: Reading) -> Interval:
    return multiply(call.interval(0), call.interval(1), is_outer=True)


def _einsum(call: Reading) -> Interval:
    equation, operands = call.value(0, "equation"), call.node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], tuple):
        operands = operands[0]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return TOP
    inputs, output = (part.replace(" ", "") for part in equation.split("->"))
    shapes = [call.shape_in(operand) for operand in operands]
    sizes = _einsum_sizes(inputs.split(","), shapes)
    if sizes is None:
        return TOP
    one = _ONE
    for operand in operands:
        one = multiply(one, call.interval_in(operand), is_outer=not set.intersection(*map(set, inputs.split(","))))
    count = math.prod(size for letter, size in sizes.items() if letter not in output)
    return one if count == 1 and len(operands) == 2 else many(one.loose(), count * len(operands), dtype_of(call))


def _einsum_sizes(terms: list[str], shapes: list[Shape | None]) -> dict[str, int] | None:
    sizes: dict[str, int] = {}
    if len(terms) != len(shapes):
        return None
    for term, shape in zip(terms, shapes, strict=True):
        if shape is None or len(term) != len(shape):
            return None
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return sizes


def _attention(call: Reading) -> Interval:
    """Return the interval of means of values; a row that sees nothing gives zeros or NaN."""
    rate = call.number(4, "dropout_p", 0.0)
    size = call.size(1, "key", -2)
    if rate is None or not 0 <= rate < 1 or size is None:
        return TOP
    mixed = multiply(hull((call.interval(2, "value"), _ZERO)), point(1 / (1 - rate))).loose()
    return averages(mixed, sum_error(4 * size + 16, mixed.magnitude, dtype_of(call)))


_MATMULS = ("matmul", "mm", "bmm", "mv", "dot")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{op: Rule(_matmul, 1, keeps_numbers=True) for op in _MATMULS},
        **{op: Rule(_added_product, 1, keeps_numbers=True) for op in ("addmm", "addmv", "baddbmm", "addbmm")},
        **{op: Rule(_convolution, 1, keeps_numbers=True) for op in _CONVOLUTIONS},
        **{op: Rule(_extreme, 0, keeps_numbers=True) for op in ("max", "min", "amax", "amin")},
        **{op: Rule(_with_indices, 0) for op in ("median", "mode", "kthvalue", "topk", "sort", "cummax", "cummin")},
        **{op: Rule(_index, 0) for op in ("argmax", "argmin", "argsort")},
        **{op: Rule(lambda _: _FRACTION, 0) for op in ("softmax", "softmin")},
        "aminmax": Rule(lambda call: call.interval(0).loose(), 0, keeps_numbers=True),
        "linear": Rule(_linear, 1, keeps_numbers=True),
        "outer": Rule(_outer, 1, keeps_numbers=True),
        "einsum": Rule(_einsum, 1, keeps_numbers=True),
        "scaled_dot_product_attention": Rule(_attention, 1),
        "sum": Rule(_sum, 1, keeps_numbers=True),
        "mean": Rule(_mean, 1, keeps_numbers=True),
        "cumsum": Rule(_cumulated, 1, keeps_numbers=True),
        "prod": Rule(_multiplied, 0, keeps_numbers=True),
        "cumprod": Rule(_multiplied, 0, keeps_numbers=True),
        "msort": Rule(lambda call: call.interval(0), 0, keeps_numbers=True),
        "count_nonzero": Rule(_counted, 0),
        "var": Rule(_variance),
        "std": Rule(_deviation, 8),
        "var_mean": Rule(_variance_and_mean),
        "std_mean": Rule(_deviation_and_mean, 8),
        "logsumexp": Rule(_log_sum_exp, 8),
        "logcumsumexp": Rule(_log_sum_exp, 8),
        "log_softmax": Rule(_log_softmax, 32),
    }
)
