"""Decisions on measured trials: which baseline counts, which candidates are worth proving, what the verdict is."""

import math
from collections.abc import Sequence

from autoprec.records.run import Interval, TrialRecord, Verdict


def faithful_baselines(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the faithful baselines, the fastest first; strict fp32 is always among them."""
    baselines = [trial for trial in trials if trial.kind == "baseline" and trial.is_faithful and trial.speedup]
    return tuple(sorted(baselines, key=_negative_speedup))


def best_baseline(trials: Sequence[TrialRecord]) -> TrialRecord:
    """Return the fastest faithful baseline by its point estimate."""
    return faithful_baselines(trials)[0]


def simplest_of_the_best(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the faithful baselines in the order in which they deserve to be written.

    First those that cannot be told from the fastest one, whose interval reaches its point estimate, in the order they
    were enqueued, which is from the simplest on; then the others, the fastest first.
    """
    ranked = faithful_baselines(trials)
    best = ranked[0]
    equal = [trial for trial in ranked if _interval(trial).high >= _interval(best).value]
    rest = [trial for trial in ranked if trial not in equal]
    return (*sorted(equal, key=lambda trial: trial.number), *rest)


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


def _interval(trial: TrialRecord) -> Interval:
    assert trial.speedup is not None
    return trial.speedup


def _negative_speedup(trial: TrialRecord) -> tuple[float, int]:
    return (-_interval(trial).value, trial.number)
