"""Durations as people write them: `90s`, `5m`, `1h30m`."""

import re

from autoprec.errors import SpaceError

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def parse_duration(text: str) -> float:
    """Return the seconds that `text` stands for.

    Raises: `SpaceError` if it is not hours, minutes and seconds in that order, or not above zero.
    """
    match = _DURATION.fullmatch(text.strip())
    parts = match.groups() if match else (None, None, None)
    if not any(parts):
        raise SpaceError(f'"{text}" is not a duration; write hours, minutes and seconds as in 90s, 5m or 1h30m')
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts, (3600, 60, 1), strict=True))
    if seconds <= 0:
        raise SpaceError(f'"{text}" leaves no time; give a duration above zero, as in 90s, 5m or 1h30m')
    return seconds


def format_duration(seconds: float) -> str:
    """Return `seconds` as `parse_duration` reads it, rounded to whole seconds from ten seconds on."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h" * bool(hours), f"{minutes}m" * bool(minutes), f"{rest}s" * bool(rest)]
    return "".join(parts)
