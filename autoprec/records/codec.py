"""Frozen dataclasses <-> plain JSON values, driven by the type hints of the fields."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin

from autoprec.errors import RecordError

T = TypeVar("T")

_HINTS: dict[type[Any], dict[str, Any]] = {}
# JSON has no word for these three; a loss curve has all of them.
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any) -> Any:
    """Return `value` as JSON values: dataclasses as objects in field order, tuples as lists, nan and inf as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(kind: type[T], data: Any, where: str = "record") -> T:
    """Return the `kind` that `encode` turned into `data`; keys `kind` does not have are refused.

    Raises: `RecordError` naming the place in the data that does not fit.
    """
    result: T = _decode(kind, data, where)
    return result


def _decode(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union or origin is types.UnionType:
        return None if data is None else _decode(next(arg for arg in args if arg is not type(None)), data, where)
    if origin is typing.Literal:
        _expect(data in args, kind, data, where)
        return data
    if origin is tuple:
        _expect(isinstance(data, list), kind, data, where)
        return tuple(_decode(args[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(data, dict), kind, data, where)
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float:
        return _decode_float(data, where)
    _expect(isinstance(data, kind) and (kind is bool or not isinstance(data, bool)), kind, data, where)
    return data


def _decode_float(data: Any, where: str) -> float:
    if isinstance(data, str) and data in _NON_FINITE:
        return _NON_FINITE[data]
    _expect(isinstance(data, int | float) and not isinstance(data, bool), float, data, where)
    return float(data)


def _decode_dataclass(kind: type[Any], data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), kind, data, where)
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [key for key in data if key not in fields]
    _expect(not unknown, f"{kind.__name__} (fields {', '.join(fields)})", unknown, where)
    optional = {
        name
        for name, field in fields.items()
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    missing = [name for name in fields if name not in data and name not in optional]
    _expect(not missing, f"{kind.__name__} with {', '.join(missing)}", sorted(data), where)
    return kind(**{name: _decode(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _expect(condition: object, kind: Any, data: Any, where: str) -> None:
    if not condition:
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        raise RecordError(f"{where}: expected {name}, found {data!r:.120}; the file is damaged or not autoprec's")
