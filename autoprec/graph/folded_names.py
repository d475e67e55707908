"""Names of modules and parameters folded over their numbers: `blocks.{0-3}.mlp` for four names of one value."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

_Part: TypeAlias = str | tuple[int, ...]
_Name: TypeAlias = tuple[_Part, ...]

_NUMBER = re.compile(r"0|[1-9]\d*")
_RANGES = re.compile(r"\{\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\}")


def folded(values: Mapping[str, str]) -> dict[str, str]:
    """Return `values` with one name for all that differ in a number alone and have the same value.

    `unfolded` gives `values` back. The order is that of the first of each kind.
    """
    entries: list[tuple[_Name, str]] = [(tuple(name.split(".")), value) for name, value in values.items()]
    for place in range(max((len(name) for name, _ in entries), default=0)):
        merged: dict[tuple[_Name, str], list[int]] = {}
        for name, value in entries:
            key, numbers = _without_number(name, place)
            merged.setdefault((key, value), []).extend(numbers)
        entries = [(_with_numbers(name, place, numbers), value) for (name, value), numbers in merged.items()]
    return {".".join(map(_written, name)): value for name, value in entries}


def unfolded(values: Mapping[str, str]) -> dict[str, str]:
    """Return what `folded` folded: a value for every single name."""
    return {name: value for text, value in values.items() for name in _names(text)}


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as text: `0-3,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def numbers_in(text: str) -> Iterator[int]:
    """Yield the numbers that `ranges` wrote."""
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _without_number(name: _Name, place: int) -> tuple[_Name, list[int]]:
    part = name[place] if place < len(name) else ""
    if isinstance(part, str) and _NUMBER.fullmatch(part):
        return (*name[:place], (), *name[place + 1 :]), [int(part)]
    return name, []


def _with_numbers(name: _Name, place: int, numbers: list[int]) -> _Name:
    if not numbers:
        return name
    part: _Part = str(numbers[0]) if len(numbers) == 1 else tuple(numbers)
    return (*name[:place], part, *name[place + 1 :])


def _written(part: _Part) -> str:
    return part if isinstance(part, str) else f"{{{ranges(part)}}}"


def _names(text: str) -> Iterator[str]:
    parts = [
        [str(number) for number in numbers_in(part[1:-1])] if _RANGES.fullmatch(part) else [part]
        for part in text.split(".")
    ]
    return map(".".join, itertools.product(*parts))
