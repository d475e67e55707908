"""Durations."""

import pytest

from autoprec.errors import SpaceError
from autoprec.search.duration import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("1h2m3s", 3723), ("0.5s", 0.5), (" 2h ", 7200)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 m", "m5", "30m1h", "-5m", "5min", "inf", "1e3s"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(SpaceError, match="90s, 5m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0s", "0h0m"])
def test_no_time_at_all_is_refused(text: str) -> None:
    with pytest.raises(SpaceError, match="leaves no time"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2s"), (9, "9.0s"), (90, "1m30s"), (3600, "1h"), (3723.4, "1h2m3s")]
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
