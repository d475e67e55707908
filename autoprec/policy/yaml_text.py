"""Writing YAML with one way to write each value, so that equal values are equal bytes."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_RESOLVER: Any = yaml.SafeLoader("")


def flow(value: Any) -> str:
    """Return a value as YAML on one line; mappings keep their order."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    return scalar(value)


def scalar(value: Any) -> str:
    """Return a scalar as YAML; text is plain where it can be mistaken for nothing else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) and _reads_as_text(text) else quoted(text)


def quoted(text: str) -> str:
    """Return text in double quotes, with escapes for all that does not print."""
    return '"' + "".join(_ESCAPES.get(c, c if c.isprintable() else _escape(c)) for c in text) + '"'


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return each row as one line whose cells start in the same columns; the last cell is as long as it is."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    return ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + row[-1] for row in rows]


def _reads_as_text(text: str) -> bool:
    """Return whether YAML reads unquoted `text` as text, which it does not with `null`, `yes` or `on`."""
    return bool(_RESOLVER.resolve(yaml.ScalarNode, text, (True, False)) == "tag:yaml.org,2002:str")


def _float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    mantissa, e, exponent = repr(value).partition("e")
    if e and "." not in mantissa:
        mantissa += ".0"  # YAML 1.1 reads 1e-05 as text
    return mantissa + e + exponent


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
