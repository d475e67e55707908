"""Decisions, on injected measurements."""

import pytest

from autoprec.records.run import Interval
from autoprec.search.decide import best_baseline, contenders, decide, ratio_of, simplest_of_the_best
from tests.unit.records.samples import trial


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (None, "baseline"),
        ((1.10, 1.02, 1.18), "improved"),
        ((1.02, 0.97, 1.07), "tie"),
        ((0.99, 0.95, 1.03), "tie"),
        ((1.01, 1.00, 1.02), "tie"),
        ((0.90, 0.85, 0.95), "baseline"),
    ],
)
def test_the_interval_decides(interval: tuple[float, float, float] | None, verdict: str) -> None:
    versus = None if interval is None else Interval(value=interval[0], low=interval[1], high=interval[2])
    assert decide(versus) == verdict


def test_an_unfaithful_baseline_sets_no_bar() -> None:
    trials = [
        trial("fp32", 1.0, kind="baseline", number=0),
        trial("low-bf16", 2.0, kind="baseline", number=1, verdict="unfaithful"),
        trial("autocast-bf16", 1.5, kind="baseline", number=2),
        trial("autocast-fp16", 1.8, kind="baseline", number=3, state="pruned"),
    ]
    assert best_baseline(trials).name == "autocast-bf16"


def test_of_baselines_that_cannot_be_told_apart_the_simplest_is_written() -> None:
    trials = [
        trial("fp32", 1.0, kind="baseline", number=0, spread=0.05),
        trial("fp32-matmul-bf16", 1.04, kind="baseline", number=1, spread=0.05),
        trial("autocast-bf16", 0.8, kind="baseline", number=2),
    ]
    assert best_baseline(trials).name == "fp32-matmul-bf16"
    assert [each.name for each in simplest_of_the_best(trials)] == ["fp32", "fp32-matmul-bf16", "autocast-bf16"]


def test_a_clearly_faster_baseline_is_written_before_a_simpler_one() -> None:
    trials = [trial("fp32", 1.0, kind="baseline", number=0), trial("autocast-bf16", 1.5, kind="baseline", number=1)]
    assert [each.name for each in simplest_of_the_best(trials)] == ["autocast-bf16", "fp32"]


def test_contenders_are_faster_than_the_baseline_faithful_first_and_the_fastest_of_them_first() -> None:
    bar = trial("fp32", 1.0, kind="baseline", number=0)
    trials = [
        bar,
        trial("slow", 0.9, number=1),
        trial("fast", 1.3, number=2),
        trial("faster", 1.4, number=3),
        trial("wrong", 2.0, number=4, verdict="unfaithful"),
        trial("unsure", 1.6, number=5, verdict="inconclusive"),
        trial("pruned", 1.7, number=6, state="pruned"),
        trial("again", 1.4, number=7, state="duplicate"),
    ]
    assert [each.name for each in contenders(trials, bar)] == ["faster", "fast", "unsure"]


def test_a_ratio_of_estimates_is_as_wide_as_both_allow() -> None:
    quotient = ratio_of(Interval(value=1.2, low=1.1, high=1.3), Interval(value=1.0, low=0.9, high=1.1))
    assert (quotient.value, quotient.low, quotient.high) == pytest.approx((1.2, 1.0, 1.3 / 0.9))
