"""Range rules of norms, pooling, sampling and losses."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from autoprec.analysis.ranges.interval import INF, TOP, Interval, add, hull, negate, point, sum_error
from autoprec.analysis.ranges.reading import Reading, Rule
from autoprec.analysis.ranges.sums import averages, dtype_of, index_below, is_wide

_ZERO, _ONE = point(0.0), point(1.0)
_NOT_NEGATIVE = Interval(0.0, INF)


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
    return Interval(0.0, high + sum_error(count + 8, high, dtype_of(call)))


# Pooling and sampling


def _averaged(call: Reading) -> Interval:
    if call.value(6, "divisor_override", None) is not None:
        return TOP
    a = hull((call.interval(0), _ZERO))
    return averages(a, 1e-3 * a.magnitude) if is_wide(dtype_of(call)) else TOP


def _interpolated(call: Reading) -> Interval:
    if (
        not is_wide(dtype_of(call))
        or call.value(3, "mode", "nearest") == "bicubic"
        or call.value(2, "mode", "") == "bicubic"
    ):
        return TOP
    a = hull((call.interval(0), _ZERO))
    return averages(a, 1e-4 * a.magnitude)


def _pooled(call: Reading) -> Interval | tuple[Interval, ...]:
    shape, values = call.shape(0), call.interval(0).loose()
    if len(call.node.outputs) < 2:
        return values
    return values, index_below(math.prod(shape) if shape is not None else None)


# Losses that are never negative


def _distance(power: int) -> Callable[[Reading], Interval]:
    def rule(call: Reading) -> Interval:
        gap = add(call.interval(0), negate(call.interval(1, "target"))).magnitude
        a, b = call.shape(0) or (), call.shape(1, "target") or ()
        count = math.prod(a) if a == b else math.prod(a) * math.prod(b)
        count = 1 if call.value(4, "reduction", "mean") == "none" else count
        if call.value(5, "weight", None) is not None:
            return TOP
        if gap == INF or call.value(3, "reduce", None) is not None or not is_wide(dtype_of(call)):
            return _NOT_NEGATIVE
        largest = gap**power * (1 if call.value(4, "reduction", "mean") == "mean" else count)
        return Interval(0.0, largest + sum_error(count + 8, largest, dtype_of(call)))

    return rule


def _cross_entropy(call: Reading) -> Interval:
    plain = call.value(2, "weight", None) is None and call.dtype(1, "target").startswith("int")
    return _NOT_NEGATIVE if plain else TOP


def _not_negative(_: Reading) -> Interval:
    return _NOT_NEGATIVE


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
        **{op: Rule(_pooled, 0) for op in _MAX_POOLS},
        **{op: Rule(_averaged, 1, keeps_numbers=True) for op in _AVERAGES},
        **{op: Rule(_interpolated, 1) for op in ("interpolate", "upsample", "grid_sample")},
        "norm": Rule(_norm, 4),
        "linalg_vector_norm": Rule(_norm, 4),
        "linalg_norm": Rule(_not_negative, 0),
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
