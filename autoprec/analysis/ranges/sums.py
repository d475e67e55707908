"""Range rules of ops that add up: reductions, scans, products of matrices, norms, pooling, losses."""

import math
from collections.abc import Callable, Mapping
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
    negate,
    point,
    signed_like,
    sum_error,
)
from autoprec.analysis.ranges.reading import Reading, Rule, Shape

_ZERO, _ONE = point(0.0), point(1.0)
_FRACTION = Interval(0.0, 1.0)
_NOT_NEGATIVE = Interval(0.0, INF)
_EXACT = 2.0**24  # up to which float32 holds every integer


def many(one: Interval, count: int, dtype: str) -> Interval:
    """Return the interval of sums of `count` numbers in `one`, computed in `dtype` in any order."""
    if count == 0:
        return _ZERO
    total = replace(multiply(one, point(float(count))), is_integer=one.is_integer, is_tight=False)
    if dtype.startswith(("int", "uint")) or (one.is_integer and total.magnitude <= _EXACT and _is_wide(dtype)):
        return total  # every partial sum is exact
    sums = signed_like(grown(total, sum_error(count, total.magnitude, dtype)), one)
    if one.lo >= 0 and one.hi.is_integer() and total.hi <= _EXACT and _is_wide(dtype):
        return replace(sums, hi=total.hi)  # no partial sum is rounded up beyond as many times the largest term
    return sums


def _is_wide(dtype: str) -> bool:
    return dtype in ("float32", "float64")


def _dtype(call: Reading) -> str:
    return call.node.outputs[0].dtype if call.node.outputs else ""


def _sum(call: Reading) -> Interval:
    count = call.num_reduced()
    return TOP if count is None else many(call.interval(0), count, _dtype(call))


def _mean(call: Reading) -> Interval:
    count, a = call.num_reduced(), call.interval(0)
    if not count:
        return TOP
    return _averages(a, sum_error(count + 1, a.magnitude, _dtype(call)))


def _averages(a: Interval, error: float) -> Interval:
    """Return the interval of means of elements of `a`, computed with that error."""
    return signed_like(grown(replace(a, is_integer=False, is_tight=False), error), a)


def _cumulated(call: Reading) -> Interval:
    a, size = call.interval(0), call.size(0, "input", call.value(1, "dim"))
    if size is None or not size:
        return TOP
    total = many(a, size, _dtype(call))
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
    return (call.interval(0).loose(), _index_below(max(shape or (1,)) if shape is not None else None))


def _index(call: Reading) -> Interval:
    shape = call.shape(0)
    return _index_below(math.prod(shape) if shape is not None else None)


def _index_below(count: int | None) -> Interval:
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
    return grown(Interval(a.lo, a.hi + math.log(count)), 1e-2 + sum_error(8, a.magnitude, _dtype(call)))


def _log_softmax(call: Reading) -> Interval:
    a = call.interval(0)
    if not a.is_finite:
        return Interval(-INF, 0.0)
    spread = a.hi - a.lo + math.log(max(*(call.shape(0) or ()), 1, 1))
    return Interval(-spread - sum_error(8, spread + a.magnitude, _dtype(call)), 0.0)


# Products of matrices


def _matmul(call: Reading) -> Interval:
    left, right = call.shape(0), call.shape(1, "other")
    if not left or not right:
        return TOP
    if left[-1] == 1 and 1 in (math.prod(left[:-2]), math.prod(right[:-2])):
        return multiply(call.interval(0), call.interval(1, "other"), is_outer=True)
    return many(multiply(call.interval(0), call.interval(1, "other")).loose(), left[-1], _dtype(call))


def _linear(call: Reading) -> Interval:
    size = call.size(0, "input", -1)
    if size is None:
        return TOP
    product = many(multiply(call.interval(0), call.interval(1, "weight")).loose(), size, _dtype(call))
    return _with_bias(product, call.interval(2, "bias", _ZERO), size, _dtype(call))


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
    product = many(multiply(call.interval(1), call.interval(2)).loose(), count, _dtype(call))
    scaled = multiply(product, call.interval(9, "alpha", _ONE))
    return _with_bias(scaled, multiply(call.interval(0), call.interval(9, "beta", _ONE)), count, _dtype(call))


def _convolution(call: Reading) -> Interval:
    weight = call.shape(1, "weight")
    if not weight or any(isinstance(value, str) and value not in ("same", "valid") for value in call.given()):
        return TOP
    count = math.prod(weight[1:])
    if call.node.op.startswith("conv_transpose"):
        count = math.prod(weight) // max(weight[1], 1)
    one = hull((multiply(call.interval(0), call.interval(1, "weight")), _ZERO)).loose()
    product = many(one, count, _dtype(call))
    if product.is_finite:  # algorithms that transform their input (Winograd) have larger errors, of either sign
        product = grown(product, 16 * sum_error(count, product.magnitude, _dtype(call)))
    return _with_bias(product, call.interval(2, "bias", _ZERO), count, _dtype(call))


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
    return one if count == 1 and len(operands) == 2 else many(one.loose(), count * len(operands), _dtype(call))


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
    return _averages(mixed, sum_error(4 * size + 16, mixed.magnitude, _dtype(call)))


# Norms


def _normed(count: int | None, weight: Interval, bias: Interval) -> Interval:
    """Return the interval of `count` numbers of unit mean square, scaled and shifted.

    Holds for exact arithmetic, with 1 % for that of the kernels, which center before they square. Input that is equal
    up to its last digits passes it in FP32 too.
    """
    if not count:
        return TOP
    scale = 1.01 * math.sqrt(count) * weight.magnitude
    return add(Interval(-scale, scale) if scale < INF else TOP, bias).loose()


def _layer_norm(call: Reading) -> Interval:
    shape = call.value(1, "normalized_shape", ())
    sizes = shape if isinstance(shape, tuple) else (shape,)
    if not all(isinstance(size, int) for size in sizes):
        return TOP
    has_bias = call.node.op == "layer_norm"
    bias = call.interval(3, "bias", _ZERO) if has_bias else _ZERO
    return _normed(math.prod(sizes), call.interval(2, "weight", _ONE), bias)


def _group_norm(call: Reading) -> Interval:
    shape, groups = call.shape(0), call.value(1, "num_groups")
    if not shape or len(shape) < 2 or not isinstance(groups, int) or not groups:
        return TOP
    count = math.prod(shape[1:]) // groups
    return _normed(count, call.interval(2, "weight", _ONE), call.interval(3, "bias", _ZERO))


def _batch_norm(call: Reading) -> Interval:
    shape = call.shape(0)
    if not shape or len(shape) < 2 or call.value(5, "training", default=False) is not True or _is_torchs_own(call):
        return TOP
    count = math.prod(shape) // shape[1]
    return _normed(count, call.interval(3, "weight", _ONE), call.interval(4, "bias", _ZERO))


def _instance_norm(call: Reading) -> Interval:
    shape = call.shape(0)
    if (
        not shape
        or len(shape) < 3
        or call.value(5, "use_input_stats", default=True) is not True
        or _is_torchs_own(call)
    ):
        return TOP
    return _normed(math.prod(shape[2:]), call.interval(3, "weight", _ONE), call.interval(4, "bias", _ZERO))


def _is_torchs_own(call: Reading) -> bool:
    """Return whether `torch.batch_norm` is called and not its namesake in functional, with another order."""
    return len(call.node.args) > 8


def _unit(call: Reading) -> Interval:
    order, eps = call.number(1, "p", 2.0), call.number(3, "eps", 1e-12)
    return Interval(-1.01, 1.01) if order is not None and order >= 1 and eps is not None and eps >= 1e-12 else TOP


def _norm(call: Reading) -> Interval:
    a, count = call.interval(0), call.num_reduced()
    order = call.value(1, "p", 2.0) if call.node.op == "norm" else call.value(1, "ord", None)
    if order not in (2, 2.0, None, "fro") or count is None or not a.is_finite:
        return _NOT_NEGATIVE
    high = math.sqrt(count) * a.magnitude
    return Interval(0.0, high + sum_error(count + 8, high, _dtype(call)))


# Pooling and sampling


def _averaged(call: Reading) -> Interval:
    if call.value(6, "divisor_override", None) is not None:
        return TOP
    a = hull((call.interval(0), _ZERO))
    return _averages(a, 1e-3 * a.magnitude) if _is_wide(_dtype(call)) else TOP


def _interpolated(call: Reading) -> Interval:
    if (
        not _is_wide(_dtype(call))
        or call.value(3, "mode", "nearest") == "bicubic"
        or call.value(2, "mode", "") == "bicubic"
    ):
        return TOP
    a = hull((call.interval(0), _ZERO))
    return _averages(a, 1e-4 * a.magnitude)


def _pooled(call: Reading) -> Interval | tuple[Interval, ...]:
    shape, values = call.shape(0), call.interval(0).loose()
    if len(call.node.outputs) < 2:
        return values
    return values, _index_below(math.prod(shape) if shape is not None else None)


# Losses that are never negative


def _distance(power: int) -> Callable[[Reading], Interval]:
    def rule(call: Reading) -> Interval:
        gap = add(call.interval(0), negate(call.interval(1, "target"))).magnitude
        a, b = call.shape(0) or (), call.shape(1, "target") or ()
        count = math.prod(a) if a == b else math.prod(a) * math.prod(b)
        count = 1 if call.value(4, "reduction", "mean") == "none" else count
        if call.value(5, "weight", None) is not None:
            return TOP
        if gap == INF or call.value(3, "reduce", None) is not None or not _is_wide(_dtype(call)):
            return _NOT_NEGATIVE
        largest = gap**power * (1 if call.value(4, "reduction", "mean") == "mean" else count)
        return Interval(0.0, largest + sum_error(count + 8, largest, _dtype(call)))

    return rule


def _cross_entropy(call: Reading) -> Interval:
    plain = call.value(2, "weight", None) is None and call.dtype(1, "target").startswith("int")
    return _NOT_NEGATIVE if plain else TOP


def _not_negative(_: Reading) -> Interval:
    return _NOT_NEGATIVE


_MATMULS = ("matmul", "mm", "bmm", "mv", "dot")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_MAX_POOLS = tuple(
    f"{kind}max_pool{n}d{tail}" for kind in ("", "adaptive_") for n in (1, 2, 3) for tail in ("", "_with_indices")
)
_AVERAGES = (
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
)

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{op: Rule(_matmul, 1, keeps_numbers=True) for op in _MATMULS},
        **{op: Rule(_added_product, 1, keeps_numbers=True) for op in ("addmm", "addmv", "baddbmm", "addbmm")},
        **{op: Rule(_convolution, 1, keeps_numbers=True) for op in _CONVOLUTIONS},
        **{op: Rule(_pooled, 0) for op in _MAX_POOLS},
        **{op: Rule(_averaged, 1, keeps_numbers=True) for op in _AVERAGES},
        **{op: Rule(_interpolated, 1) for op in ("interpolate", "upsample", "grid_sample")},
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
        "norm": Rule(_norm, 4),
        "linalg_vector_norm": Rule(_norm, 4),
        "linalg_norm": Rule(_not_negative, 0),
        "logsumexp": Rule(_log_sum_exp, 8),
        "logcumsumexp": Rule(_log_sum_exp, 8),
        "log_softmax": Rule(_log_softmax, 32),
        "layer_norm": Rule(_layer_norm),
        "rms_norm": Rule(_layer_norm),
        "group_norm": Rule(_group_norm),
        "batch_norm": Rule(_batch_norm),
        "instance_norm": Rule(_instance_norm),
        "normalize": Rule(_unit, 0),
        "cosine_similarity": Rule(lambda _: Interval(-1.01, 1.01), 0),
        "mse_loss": Rule(_distance(2), 1),
        "l1_loss": Rule(_distance(1), 1),
        "smooth_l1_loss": Rule(_not_negative, 0),
        "huber_loss": Rule(_not_negative, 0),
        "cross_entropy": Rule(_cross_entropy, 0),
    }
)
