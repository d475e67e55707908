"""Range rules of arithmetic and of ops that choose between numbers, element by element."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from autoprec.analysis.ranges.functions import LIBRARY
from autoprec.analysis.ranges.interval import (
    INF,
    TOP,
    Interval,
    add,
    clip,
    divide,
    hull,
    largest,
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
    if _is_below_its_maximum(call):
        return clip(difference, -INF, 0.0).loose()
    return clip(difference, 0.0, INF).loose() if _is_spread(call) else difference


def _is_spread(call: Reading) -> bool:
    """Return whether a call is `x.amax(...) - x.amin(...)`."""
    top, bottom = call.producer(0), call.producer(1)
    if top is None or bottom is None or (top.op, bottom.op) not in (("amax", "amin"), ("max", "min")):
        return False
    is_same = (top.args, top.kwargs) == (bottom.args, bottom.kwargs) and len(top.outputs) == 1
    return is_same and call.is_pure and "alpha" not in call.node.kwargs


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


def _within(lo: float, hi: float) -> Callable[[Reading], Interval]:
    """Return the rule of a function that moves its argument into the range from `lo` to `hi`."""
    return lambda call: clip(call.interval(0), lo, hi)


def _toward_zero(call: Reading) -> Interval:
    """Return the interval of results that lie between the argument and zero."""
    return hull((call.interval(0), _ZERO)).loose()


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
        "nan_to_num": _without_nan,
        "copysign": _symmetric,
    }
)
_LIBRARY_KEEPS: Mapping[str, Callable[[Reading], Interval]] = MappingProxyType(
    {
        "softshrink": lambda call: replace(_toward_zero(call), is_integer=False),
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
        "reciprocal": lambda call: divide(_ONE, call.interval(0)),
        "lerp": _mixed,
        "glu": lambda call: Interval(-call.interval(0).magnitude, call.interval(0).magnitude),
    }
)

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{op: Rule(apply, 0, keeps_numbers=True) for op, apply in _EXACT.items()},
        **{op: Rule(apply, 1, keeps_numbers=True) for op, apply in _ROUNDED_ONCE.items()},
        **{op: Rule(apply, 1) for op, apply in _MAY_BE_NAN_ONCE.items()},
        **{op: Rule(apply, LIBRARY, keeps_numbers=True) for op, apply in _LIBRARY_KEEPS.items()},
        **{op: Rule(apply, LIBRARY) for op, apply in _LIBRARY_MAY_BE_NAN.items()},
    }
)
