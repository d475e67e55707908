"""Decisions on measured trials: which baseline counts, which candidates are worth proving, what the verdict is."""

import math
from collections.abc import Sequence
from dataclasses import replace

from autoprec.records.run import Interval, TrialRecord, Verdict


def speedup_of(trial: TrialRecord) -> Interval | None:
    """Return the speed-up over FP32; that of strict fp32 is 1 by definition, in the interval that its noise has."""
    if trial.speedup is None or (trial.kind, trial.name) != ("baseline", "fp32"):
        return trial.speedup
    value, low, high = trial.speedup.value, trial.speedup.low, trial.speedup.high
    return Interval(value=1.0, low=low / value, high=high / value)


def faithful_baselines(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the faithful baselines, the fastest by their point estimates first; strict fp32 is always among them."""
    faithful = [trial for trial in trials if trial.kind == "baseline" and trial.is_faithful and trial.speedup]
    return tuple(sorted((replace(each, speedup=speedup_of(each)) for each in faithful), key=_negative_speedup))


def best_baseline(trials: Sequence[TrialRecord]) -> TrialRecord:
    """Return the baseline that sets the bar and is written if nothing beats it.

    It is the fastest by its point estimate of those that are faster than FP32 beyond their spread, of equal ones the
    simplest; strict fp32 if there is none. One that is left out for its spread may be nominally faster, but its
    interval reaches down to FP32, so the best one is not slower beyond the spread.
    """
    ranked = faithful_baselines(trials)
    faster = [trial for trial in ranked if _interval(trial).low > 1 and trial.name != "fp32"]
    return next(iter([*faster, *(trial for trial in ranked if trial.name == "fp32"), *ranked]))


def doubtful_baselines(trials: Sequence[TrialRecord], best: TrialRecord) -> tuple[TrialRecord, ...]:
    """Return baselines that are faster than `best` beyond their spread and that the horizon was too short to judge."""
    bar = _interval(best).value
    found = [
        trial
        for trial in trials
        if trial.kind == "baseline" and trial.state == "complete" and trial.speedup and trial.speedup.low > bar
        and trial.fidelity is not None and trial.fidelity.verdict == "inconclusive"
    ]  # fmt: skip
    return tuple(sorted(found, key=_negative_speedup))


def contenders(trials: Sequence[TrialRecord], baseline: TrialRecord) -> tuple[TrialRecord, ...]:
    """Return the trials faster than `baseline` by their point estimates that may be faithful, in the order to prove.

    Those shown to be faithful come first, then those that the horizon was too short to judge; the fastest first.
    """
    bar = _interval(baseline).value
    faster = [
        trial
        for trial in trials
        if trial.kind != "baseline" and trial.state == "complete" and trial.speedup and trial.speedup.value > bar
    ]
    unsure = [trial for trial in faster if trial.fidelity is not None and trial.fidelity.verdict == "inconclusive"]
    sure = [trial for trial in faster if trial.is_faithful]
    return (*sorted(sure, key=_negative_speedup), *sorted(unsure, key=_negative_speedup))


def decide(versus_baseline: Interval | None) -> Verdict:
    """Return the verdict on a verified candidate from its speed-up over the best baseline, both timed side by side.

    None: there was no candidate to time.
    """
    if versus_baseline is None or versus_baseline.high < 1:
        return "baseline"
    return "improved" if versus_baseline.low > 1 else "tie"


def ratio_of(first: Interval, second: Interval) -> Interval:
    """Return the quotient of two independent estimates; its interval is the widest one both allow."""
    high = first.high / second.low if second.low > 0 else math.inf
    return Interval(value=first.value / second.value, low=first.low / second.high, high=high)


def product_of(first: Interval, second: Interval) -> Interval:
    """Return the product of two independent estimates; its interval is the widest one both allow."""
    return Interval(value=first.value * second.value, low=first.low * second.low, high=first.high * second.high)


def _interval(trial: TrialRecord) -> Interval:
    interval = speedup_of(trial)
    assert interval is not None
    return interval


def _negative_speedup(trial: TrialRecord) -> tuple[float, int]:
    return (-_interval(trial).value, trial.number)
