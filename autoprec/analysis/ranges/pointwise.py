"""Range rules of pointwise ops."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from autoprec.analysis.ranges.interval import (
    INF,
    TOP,
    Interval,
    add,
    clip,
    divide,
    hull,
    largest,
    map_monotone,
    multiply,
    negate,
    point,
)
from autoprec.analysis.ranges.reading import Reading, Rule
from autoprec.graph.opgraph import Ref

_ZERO, _ONE = point(0.0), point(1.0)
_LIBRARY = 8  # roundings: vectorized transcendental functions are off by at most 4 units in the last place


def _sum(call: Reading) -> Interval:
    return add(call.interval(0), multiply(call.interval(1), call.interval(2, "alpha", _ONE)))


def _difference(call: Reading) -> Interval:
    a, b = call.interval(0), call.interval(1)
    difference = add(a, negate(multiply(b, call.interval(2, "alpha", _ONE))))
    return clip(difference, -INF, 0.0).loose() if _is_below_its_maximum(call) else difference


def _is_below_its_maximum(call: Reading) -> bool:
    """Return whether a call is `x - x.amax(...)`."""
    top = call.producer(1)
    if top is None or top.op not in ("amax", "max") or len(top.outputs) != 1 or not call.is_pure:
        return False
    is_plain = "alpha" not in call.node.kwargs and len(top.args) + len(top.kwargs) <= 3
    return is_plain and top.args[:1] == call.node.args[:1] and not any(isinstance(each, Ref) for each in top.args[1:])


def is_outer_product(call: Reading) -> bool:
    """Return whether each element of one operand meets each of the other: they extend along different dimensions."""
    a, b = call.shape(0), call.shape(1)
    if a is None or b is None:
        return False
    return all(x == 1 or y == 1 for x, y in zip(reversed(a), reversed(b), strict=False))


def _product(call: Reading) -> Interval:
    a, b = call.interval(0), call.interval(1)
    product = multiply(a, b, is_outer=is_outer_product(call))
    if len(call.node.args) == 2 and call.node.args[0] == call.node.args[1]:  # x * x
        return replace(product, lo=0.0 if a.contains_zero else min(a.lo * a.lo, a.hi * a.hi), is_tight=False)
    return product


def _quotient(call: Reading) -> Interval:
    quotient = divide(call.interval(0), call.interval(1))
    rounding = call.value(2, "rounding_mode", None)
    return quotient if rounding is None else _floored(quotient)


def _floored(quotient: Interval) -> Interval:
    """Return the interval of integers on either side of the quotients."""
    if not quotient.is_finite:
        return TOP
    lo, hi = math.floor(quotient.lo), math.ceil(quotient.hi)
    return Interval(lo, hi, is_integer=True, is_number=quotient.is_number)


def _remainder(call: Reading) -> Interval:
    divisor = call.interval(1)
    if divisor.lo <= 0 or not call.interval(0).is_finite:
        return TOP
    exact = call.interval(0).is_integer and divisor.is_integer
    return Interval(0.0, divisor.hi, is_integer=exact, is_number=divisor.is_number and call.interval(0).is_number)


def _absolute(call: Reading) -> Interval:
    a = call.interval(0)
    return replace(a, lo=0.0 if a.contains_zero else a.smallest_nonzero, hi=a.magnitude, is_tight=False)


def _power(call: Reading) -> Interval:
    base, exponent = call.interval(0), call.interval(1, "exponent")
    power, number = call.number(1, "exponent"), call.number(0, "self")
    if power is not None:
        return _powers_of(base, float(power))
    if number is not None and number > 0:
        function = _guarded(lambda x: math.pow(number, x))
        ends = [function(exponent.lo), function(exponent.hi)]
        return Interval(min(ends), max(ends), is_number=exponent.is_number, is_tight=exponent.is_tight)
    return Interval(0.0, INF) if base.lo >= 0 else TOP


def _powers_of(base: Interval, exponent: float) -> Interval:
    if exponent == 0:
        return _ONE
    function = _guarded(lambda x: math.pow(x, exponent))
    is_integral = float(exponent).is_integer()
    if base.lo >= 0 and (exponent > 0 or base.lo > 0):
        low, high = sorted((function(base.lo), function(base.hi)))
        kept = is_integral and exponent > 0
        return Interval(low, high, base.is_integer and kept, base.is_number, base.is_tight)
    if not is_integral or exponent < 0:
        return Interval(0.0, INF) if exponent % 2 == 0 or (base.lo >= 0 and not is_integral) else TOP  # 1 / -0 is -inf
    if exponent % 2:
        return replace(map_monotone(function, base), is_integer=base.is_integer)
    low = 0.0 if base.contains_zero else function(base.hi)
    return Interval(low, function(base.magnitude), base.is_integer, base.is_number)


def _guarded(function: Callable[[float], float]) -> Callable[[float], float]:
    """Return `function`, infinite where Python says that it overflows."""

    def guarded(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return -INF if x < 0 else INF
        except (ValueError, ZeroDivisionError):
            return INF

    return guarded


def _rising(function: Callable[[float], float]) -> Callable[[Reading], Interval]:
    """Return the rule of a function that rises everywhere."""
    guarded = _guarded(function)
    return lambda call: map_monotone(guarded, call.interval(0))


def _exponential(function: Callable[[float], float], floor: float) -> Callable[[Reading], Interval]:
    """Return the rule of a function that rises from `floor` and overflows to infinity."""

    def value(x: float) -> float:
        try:
            return function(x) if x > -INF else floor
        except OverflowError:
            return INF

    return lambda call: map_monotone(value, call.interval(0))


def _logarithm(function: Callable[[float], float], pole: float) -> Callable[[Reading], Interval]:
    """Return the rule of a logarithm, whose argument cannot be below `pole` without giving NaN."""

    def value(x: float) -> float:
        if x <= pole:
            return -INF
        return INF if x == INF else function(x)

    return lambda call: replace(map_monotone(value, call.interval(0)), is_integer=False)


def _root(call: Reading) -> Interval:
    return map_monotone(lambda x: math.sqrt(x) if x > 0 else 0.0, call.interval(0))


def _inverse_root(call: Reading) -> Interval:
    a = call.interval(0)
    if a.lo <= 0:  # at -0 it is -inf
        return TOP
    return Interval(1 / math.sqrt(a.hi), 1 / math.sqrt(a.lo), is_number=a.is_number)


def _fixed(lo: float, hi: float) -> Callable[[Reading], Interval]:
    """Return the rule of a function whose values lie from `lo` to `hi` whatever its argument."""
    interval = Interval(lo, hi)
    return lambda _: interval


def _within(lo: float, hi: float) -> Callable[[Reading], Interval]:
    """Return the rule of a function that moves its argument into the range from `lo` to `hi`."""
    return lambda call: clip(call.interval(0), lo, hi)


def _dips(depth: float) -> Callable[[Reading], Interval]:
    """Return the rule of an activation that lies between x and 0, but for a dip to -`depth` below zero."""

    def rule(call: Reading) -> Interval:
        a = call.interval(0)
        return Interval(0.0 if a.lo >= 0 else -depth, max(a.hi, 0.0), is_number=a.is_number)

    return rule


def _toward_zero(call: Reading) -> Interval:
    """Return the interval of results that lie between the argument and zero."""
    return hull((call.interval(0), _ZERO)).loose()


def _leaky(call: Reading) -> Interval:
    slope = call.number(1, "negative_slope", 0.01)
    if slope is None or not 0 <= slope <= 1:
        return TOP
    return map_monotone(lambda x: x if x >= 0 else slope * x, call.interval(0))


def _elu(call: Reading) -> Interval:
    alpha = call.number(1, "alpha", 1.0)
    return TOP if alpha is None or alpha < 0 else Interval(-alpha, max(call.interval(0).hi, 0.0))


def _softplus(call: Reading) -> Interval:
    beta = call.number(1, "beta", 1.0)
    a = call.interval(0)
    return Interval(0.0, max(a.hi, 0.0) + 0.7 / beta, is_number=a.is_number) if beta and beta > 0 else TOP


def _log_sigmoid(call: Reading) -> Interval:
    a = call.interval(0)
    return Interval(min(a.lo, 0.0) - 0.7, 0.0, is_number=a.is_number)


def _hardtanh(call: Reading) -> Interval:
    low, high = call.number(1, "min_val", -1.0), call.number(2, "max_val", 1.0)
    return TOP if low is None or high is None else clip(call.interval(0), low, high)


def _dropped(call: Reading) -> Interval:
    rate = call.number(1, "p", 0.5)
    if rate is None or not 0 <= rate < 1:
        return hull((call.interval(0), _ZERO)).loose() if rate == 1 else TOP
    kept = multiply(call.interval(0), point(1 / (1 - rate)))
    return replace(hull((kept, call.interval(0), _ZERO)), is_integer=False, is_tight=False)


def _clamped(call: Reading) -> Interval:
    a = call.interval(0)
    low, high = call.interval(1, "min", point(-INF)), call.interval(2, "max", point(INF))
    return _smaller(_larger(a, low), high)


def _larger(a: Interval, b: Interval) -> Interval:
    is_number = a.is_number and b.is_number
    return Interval(max(a.lo, b.lo), max(a.hi, b.hi), _both_integers(a, b), is_number, _one_is_bound(a, b))


def _smaller(a: Interval, b: Interval) -> Interval:
    is_number = a.is_number and b.is_number
    return Interval(min(a.lo, b.lo), min(a.hi, b.hi), _both_integers(a, b), is_number, _one_is_bound(a, b))


def _one_is_bound(a: Interval, b: Interval) -> bool:
    return (a.is_tight and b.is_single) or (math.isinf(b.lo) and b.lo == b.hi and a.is_tight)


def _both_integers(a: Interval, b: Interval) -> bool:
    return (a.is_integer or (math.isinf(a.lo) and a.lo == a.hi)) and (
        b.is_integer or (math.isinf(b.lo) and b.lo == b.hi)
    )


def _either(*places: int) -> Callable[[Reading], Interval]:
    """Return the rule of an op each of whose results is an element of one of these arguments."""
    return lambda call: hull(call.interval(place) for place in places).loose()


def _where(call: Reading) -> Interval:
    """Return the interval of `torch.where(condition, x, y)` and of `x.where(condition, y)`."""
    places = (1, 2) if call.dtype(0, "condition") == "bool" and call.dtype(1) != "bool" else (0, 1, 2)
    names = ("condition", "input", "other")
    return hull(call.interval(place, names[place]) for place in places).loose()


def _filled(call: Reading) -> Interval:
    return hull((call.interval(0), call.interval(2, "value"))).loose()


def _mixed(call: Reading) -> Interval:
    start, end, weight = call.interval(0), call.interval(1, "end"), call.interval(2, "weight")
    if weight.lo >= 0 and weight.hi <= 1:
        both = hull((start, end))
        return replace(both, is_integer=False, is_tight=False) if both.is_finite else TOP
    return add(start, multiply(weight, add(end, negate(start))))


def _with_product(call: Reading) -> Interval:
    product = multiply(call.interval(1, "tensor1"), call.interval(2, "tensor2"))
    return add(call.interval(0), multiply(product, call.interval(3, "value", _ONE))).loose()


def _rounded(call: Reading) -> Interval:
    if call.value(1, "decimals", 0):
        return TOP
    a = call.interval(0)
    return Interval(_whole(math.floor, a.lo), _whole(math.ceil, a.hi), is_integer=True, is_number=a.is_number)


def _whole(function: Callable[[float], int], x: float) -> float:
    return x if math.isinf(x) else float(function(x))


def _without_nan(call: Reading) -> Interval:
    top = largest(call.node.outputs[0].dtype) if call.node.outputs else None
    names = ("nan", "posinf", "neginf")
    if top is None or any(call.value(place, name, None) is not None for place, name in enumerate(names[1:], 2)):
        return TOP
    nan = call.interval(1, "nan", _ZERO)
    return replace(hull((clip(call.interval(0), -top, top), nan)), is_number=True, is_tight=False)


def _threshold(call: Reading) -> Interval:
    return hull((call.interval(0), call.interval(2, "value"))).loose()


def _symmetric(call: Reading) -> Interval:
    bound = call.interval(0).magnitude
    return Interval(-bound, bound)


def _steps(call: Reading) -> Interval:
    a = call.interval(0)
    return add(a, negate(a)).loose() if call.value(1, "n", 1) == 1 and not call.value(3, "prepend") else TOP


def _sigmoid(x: float) -> float:
    if x < 0:
        power = math.exp(max(x, -745.0))
        return power / (1 + power)
    return 1 / (1 + math.exp(-x))


_EXACT: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "abs": _absolute,
        "neg": lambda call: negate(call.interval(0)),
        "positive": lambda call: call.interval(0),
        "relu": _within(0.0, INF),
        "relu6": _within(0.0, 6.0),
        "hardtanh": _hardtanh,
        "clamp": _clamped,
        "clamp_min": lambda call: _larger(call.interval(0), call.interval(1, "min")),
        "clamp_max": lambda call: _smaller(call.interval(0), call.interval(1, "max")),
        "maximum": lambda call: _larger(call.interval(0), call.interval(1, "other")),
        "minimum": lambda call: _smaller(call.interval(0), call.interval(1, "other")),
        "ceil": _rounded,
        "floor": _rounded,
        "round": _rounded,
        "trunc": _rounded,
        "masked_fill": _filled,
        "where": _where,
        "threshold": _threshold,
        "hardshrink": _toward_zero,
        "sign": lambda _: Interval(-1.0, 1.0, is_integer=True),
        "heaviside": lambda call: hull((_ZERO, _ONE, call.interval(1, "values"))).loose(),
    }
)
_ROUNDED_ONCE: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "add": _sum,
        "sub": _difference,
        "mul": _product,
        "diff": _steps,
    }
)
_MAY_BE_NAN_ONCE: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "fmax": _either(0, 1),
        "fmin": _either(0, 1),
        "div": _quotient,
        "floor_divide": lambda call: _floored(divide(call.interval(0), call.interval(1))),
        "remainder": _remainder,
        "square": lambda call: _powers_of(call.interval(0), 2.0),
        "sqrt": _root,
        "nan_to_num": _without_nan,
        "copysign": _symmetric,
    }
)
_LIBRARY_KEEPS: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "exp": _exponential(math.exp, 0.0),
        "exp2": _exponential(lambda x: math.pow(2.0, x), 0.0),
        "expm1": _exponential(math.expm1, -1.0),
        "erf": _rising(math.erf),
        "leaky_relu": _leaky,
        "softshrink": lambda call: replace(_toward_zero(call), is_integer=False),
        "gelu": _dips(0.2),
        "silu": _dips(0.3),
        "mish": _dips(0.32),
        "hardswish": _dips(0.376),
        "softplus": _softplus,
        "log_sigmoid": _log_sigmoid,
        "addcmul": _with_product,
        "dropout": _dropped,
        "dropout1d": _dropped,
        "dropout2d": _dropped,
        "dropout3d": _dropped,
        "deg2rad": lambda call: multiply(call.interval(0), point(math.pi / 180)),
        "rad2deg": lambda call: multiply(call.interval(0), point(180 / math.pi)),
    }
)
_LIBRARY_MAY_BE_NAN: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "rsqrt": _inverse_root,
        "reciprocal": lambda call: divide(_ONE, call.interval(0)),
        "log": _logarithm(math.log, 0.0),
        "log2": _logarithm(math.log2, 0.0),
        "log10": _logarithm(math.log10, 0.0),
        "log1p": _logarithm(math.log1p, -1.0),
        "lerp": _mixed,
        "elu": _elu,
        "celu": _elu,
        "atan": _fixed(-math.pi / 2, math.pi / 2),
        "atan2": _fixed(-math.pi, math.pi),
        "asin": _fixed(-math.pi / 2, math.pi / 2),
        "acos": _fixed(0.0, math.pi),
        "cosh": _fixed(1.0, INF),
        "sinc": _fixed(-0.25, 1.0),
        "frac": _fixed(-1.0, 1.0),
        "hypot": _fixed(0.0, INF),
        "glu": lambda call: Interval(-call.interval(0).magnitude, call.interval(0).magnitude),
    }
)

# The ends of these are reached where the argument is large, and no kernel passes them.
_BOUNDED: Mapping[str, tuple[Callable[[float], float] | None, float, float]] = MappingProxyType(
    {
        "sigmoid": (_sigmoid, 0.0, 1.0),
        "tanh": (math.tanh, -1.0, 1.0),
        "hardsigmoid": (None, 0.0, 1.0),
        "softsign": (None, -1.0, 1.0),
        "sin": (None, -1.0, 1.0),
        "cos": (None, -1.0, 1.0),
    }
)


def _bounded(function: Callable[[float], float] | None, lo: float, hi: float) -> Callable[[Reading], Interval]:
    def rule(call: Reading) -> Interval:
        a = call.interval(0)
        is_number = a.is_number and a.is_finite
        if function is None or not a.is_finite:
            return Interval(lo, hi, is_number=is_number)
        slack = 1e-6 if call.node.outputs and call.node.outputs[0].dtype == "float32" else 1e-2
        inside = Interval(function(a.lo) - slack, function(a.hi) + slack, is_number=is_number)
        return replace(inside, lo=max(inside.lo, lo), hi=min(inside.hi, hi))

    return rule


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{op: Rule(apply, 0, keeps_numbers=True) for op, apply in _EXACT.items()},
        **{op: Rule(apply, 1, keeps_numbers=True) for op, apply in _ROUNDED_ONCE.items()},
        **{op: Rule(apply, 1) for op, apply in _MAY_BE_NAN_ONCE.items()},
        **{op: Rule(apply, _LIBRARY, keeps_numbers=True) for op, apply in _LIBRARY_KEEPS.items()},
        **{op: Rule(apply, _LIBRARY) for op, apply in _LIBRARY_MAY_BE_NAN.items()},
        "pow": Rule(_power, 256),  # exponents are rounded too
        **{op: Rule(_bounded(*facts), 0, keeps_numbers=True) for op, facts in _BOUNDED.items()},
    }
)
