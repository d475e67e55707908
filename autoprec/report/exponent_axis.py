"""The exponent axis of a histogram as text: which binades a column stands for, and what each format does there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoprec.analysis.histogram import ExponentHistogram
from autoprec.numerics import Format

Zone: TypeAlias = Literal["flush", "subnormal", "normal", "overflow"]

NUM_ROWS = 4
_EIGHTHS = 8
_TICK_COLUMNS = 10
_MARGIN = 2
_NEAR = 16  # bounds of formats as near to the data as this are shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Columns of `step` binades each, the first of which begins at 2**`lowest`.

    `zones` says for each format what it does to the numbers of every column. `ticks` are columns and their labels.
    """

    lowest: int
    step: int
    num_columns: int
    zones: tuple[tuple[str, tuple[Zone, ...]], ...]
    ticks: tuple[tuple[int, str], ...]

    def binades(self, column: int) -> tuple[int, int]:
        """Return the lowest and the highest exponent of a column."""
        first = self.lowest + column * self.step
        return first, first + self.step - 1

    def columns(self, histogram: ExponentHistogram) -> tuple[int, ...]:
        """Return how many elements lie in each column."""
        found = [0] * self.num_columns
        for exponent, count in histogram.counts:
            found[(exponent - self.lowest) // self.step] += count
        return tuple(found)


def axis_of(histograms: Sequence[ExponentHistogram], formats: Sequence[Format], width: int) -> Axis | None:
    """Return an axis of at most `width` columns for all of `histograms`; None if no element is finite and nonzero.

    Bounds of formats that lie near the elements are within it. Two columns are the fewest there can be.
    """
    exponents = [exponent for each in histograms for exponent, _ in each.counts]
    if not exponents:
        return None
    low, high = min(exponents), max(exponents)
    bounds = [bound for each in formats for bound in _bounds(each)]
    near = [bound for bound in bounds if low - _NEAR <= bound <= high + _NEAR]
    low, high = min([low, *near]) - _MARGIN, max([high, *near]) + _MARGIN
    step = math.ceil((high - low + 1) / max(width, 2))
    while high // step - low // step >= max(width, 2):  # columns begin at multiples of their step
        step += 1
    low = low // step * step
    num_columns = (high - low) // step + 1
    ticks = [column for column in range(num_columns) if (low + column * step) % (_TICK_COLUMNS * step) == 0]
    return Axis(
        lowest=low,
        step=step,
        num_columns=num_columns,
        zones=tuple(
            (each.name, tuple(_zone(low + column * step, step, each) for column in range(num_columns)))
            for each in formats
        ),
        ticks=tuple((column, f"2^{low + column * step}") for column in ticks),
    )


def heights(histogram: ExponentHistogram, axis: Axis) -> tuple[int, ...]:
    """Return the height of each column in eighths of a row, in proportion, of `NUM_ROWS` rows in all.

    A column with elements is never empty.
    """
    columns = axis.columns(histogram)
    tallest = max(columns, default=0)
    return tuple(max(round(count / tallest * NUM_ROWS * _EIGHTHS), 1) if count else 0 for count in columns)


def _bounds(low: Format) -> tuple[int, int, int]:
    """Return the exponents below which numbers vanish, below which they are subnormal, and from which they overflow."""
    return low.min_exponent - low.mantissa_bits - 1, low.min_exponent, low.max_exponent + 1


def _zone(first: int, step: int, low: Format) -> Zone:
    """Return what `low` does to the numbers of a column; of two things, that which harms."""
    flush, normal, overflow = _bounds(low)
    if first < flush:
        return "flush"
    if first < normal:
        return "subnormal"
    return "overflow" if first + step - 1 >= overflow else "normal"
