"""Counts, ratios, times and sizes as text."""

from autoprec.records.run import Interval

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun; the plural adds an s if none is given."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def times_text(interval: Interval | None) -> str:
    """Return a ratio, "?" where there is none."""
    return "?" if interval is None else f"{interval.value:.2f}x"


def interval_text(interval: Interval) -> str:
    """Return a ratio with the interval it is sure to lie in."""
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def percent_text(fraction: float) -> str:
    """Return a fraction in percent, in two digits."""
    return f"{100 * fraction:.2g} %"


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that fits it, in three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def bytes_text(number: int) -> str:
    """Return a size in the unit that fits it, in three digits."""
    for unit, size in _BYTES:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"
