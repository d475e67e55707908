"""Numbers as text."""

import pytest

from autoprec.records.quantities import bytes_text, count_text, interval_text, percent_text, seconds_text, times_text
from autoprec.records.run import Interval

RATIO = Interval(value=1.404, low=1.3, high=1.496)


def test_a_number_has_its_noun() -> None:
    assert [count_text(number, "site") for number in (0, 1, 2)] == ["0 sites", "1 site", "2 sites"]
    assert count_text(2, "policy", "policies") == "2 policies"


def test_a_ratio_has_two_digits_after_the_point() -> None:
    assert (times_text(RATIO), times_text(None)) == ("1.40x", "?")
    assert interval_text(RATIO) == "1.40x (1.30 to 1.50)"


@pytest.mark.parametrize(("frac", "text"), [(0.0, "0 %"), (0.00123, "0.12 %"), (0.5, "50 %"), (-0.01, "-1 %")])
def test_fractions(frac: float, text: str) -> None:
    assert percent_text(frac) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(61.0, "61 s"), (1.0, "1 s"), (0.01234, "12.3 ms"), (5e-6, "5 us"), (5e-7, "5e-07 s")]
)
def test_times(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 * 2**10, "1.5 MiB"), (2**31, "2 GiB")]
)
def test_sizes(number: int, text: str) -> None:
    assert bytes_text(number) == text
