"""Decisions, on injected measurements."""

import pytest

from autoprec.records.run import Interval
from autoprec.search.decide import best_baseline, contenders, decide, ratio_of, speedup_of
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


@pytest.mark.parametrize(
    ("speedups", "best"),
    [
        ({"fp32": (1.0, 0.1), "autocast-bf16": (1.47, 1.3)}, "fp32"),  # faster only within its spread
        ({"fp32": (1.04, 0.05), "fp32-matmul-bf16": (1.0, 0.05)}, "fp32"),
        ({"fp32": (1.0, 0.1), "autocast-bf16": (1.5, 0.1)}, "autocast-bf16"),
        ({"fp32": (1.0, 0.1), "fp32-matmul-bf16": (1.3, 0.2), "autocast-bf16": (1.31, 0.2)}, "autocast-bf16"),
        ({"fp32": (1.0, 0.1), "fp32-matmul-bf16": (1.9, 1.0), "autocast-bf16": (1.2, 0.1)}, "autocast-bf16"),
        ({"fp32": (1.0, 0.1), "fp32-matmul-bf16": (1.3, 0.1), "autocast-bf16": (1.3, 0.1)}, "fp32-matmul-bf16"),
    ],
)
def test_a_baseline_displaces_fp32_only_if_it_is_faster_beyond_its_spread(
    speedups: dict[str, tuple[float, float]], best: str
) -> None:
    trials = [
        trial(name, value, kind="baseline", number=number, spread=spread)
        for number, (name, (value, spread)) in enumerate(speedups.items())
    ]
    found = best_baseline(trials)
    assert found.name == best
    nominal = max(trials, key=lambda each: each.speedup.value if each.speedup else 0)
    assert found.speedup is not None
    assert nominal.speedup is not None
    assert ratio_of(found.speedup, nominal.speedup).high >= 1  # never slower beyond the spread


def test_fp32_is_as_fast_as_itself_whatever_was_measured() -> None:
    noisy = trial("fp32", 1.25, kind="baseline", spread=0.25)
    assert speedup_of(noisy) == Interval(value=1.0, low=0.8, high=1.2)
    assert best_baseline([noisy]).speedup == speedup_of(noisy)
    assert speedup_of(trial("other", 1.25, kind="baseline", spread=0.25)) == Interval(value=1.25, low=1.0, high=1.5)


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
