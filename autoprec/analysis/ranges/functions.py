"""Range rules of functions of one number: powers, exponentials, logarithms, activations."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from autoprec.analysis.ranges.interval import INF, TOP, Interval, map_monotone, point
from autoprec.analysis.ranges.reading import Reading, Rule

_ONE = point(1.0)
LIBRARY = 8  # roundings: vectorized transcendental functions are off by at most 4 units in the last place


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


def _dips(depth: float) -> Callable[[Reading], Interval]:
    """Return the rule of an activation that lies between x and 0, but for a dip to -`depth` below zero."""

    def rule(call: Reading) -> Interval:
        a = call.interval(0)
        return Interval(0.0 if a.lo >= 0 else -depth, max(a.hi, 0.0), is_number=a.is_number)

    return rule


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


def _sigmoid(x: float) -> float:
    if x < 0:
        power = math.exp(max(x, -745.0))
        return power / (1 + power)
    return 1 / (1 + math.exp(-x))


_KEEPS: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "exp": _exponential(math.exp, 0.0),
        "exp2": _exponential(lambda x: math.pow(2.0, x), 0.0),
        "expm1": _exponential(math.expm1, -1.0),
        "erf": _rising(math.erf),
        "leaky_relu": _leaky,
        "gelu": _dips(0.2),
        "silu": _dips(0.3),
        "mish": _dips(0.32),
        "hardswish": _dips(0.376),
        "softplus": _softplus,
        "log_sigmoid": _log_sigmoid,
    }
)
_MAY_BE_NAN: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "rsqrt": _inverse_root,
        "log": _logarithm(math.log, 0.0),
        "log2": _logarithm(math.log2, 0.0),
        "log10": _logarithm(math.log10, 0.0),
        "log1p": _logarithm(math.log1p, -1.0),
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
    }
)

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
        **{op: Rule(apply, LIBRARY, keeps_numbers=True) for op, apply in _KEEPS.items()},
        **{op: Rule(apply, LIBRARY) for op, apply in _MAY_BE_NAN.items()},
        **{op: Rule(_bounded(*facts), 0, keeps_numbers=True) for op, facts in _BOUNDED.items()},
        "pow": Rule(_power, 256),  # exponents are rounded too
        "square": Rule(lambda call: _powers_of(call.interval(0), 2.0)),
        "sqrt": Rule(_root),
    }
)
