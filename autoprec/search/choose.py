"""Choosing what is written: the fastest trial that is proven, or else the baseline it could not beat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autoprec.records.run import Interval, TrialRecord, Verdict, VerificationRecord
from autoprec.search.decide import best_baseline, contenders, decide, doubtful_baselines, ratio_of

Prove: TypeAlias = Callable[[TrialRecord], VerificationRecord]
Versus: TypeAlias = Callable[[TrialRecord, TrialRecord], Interval]

_MAX_CONTENDERS = 3
_MAX_DOUBTFUL = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The trial whose policy is written, and how it compares. `versus` is its speed-up over `best`."""

    trial: TrialRecord
    best: TrialRecord
    verdict: Verdict
    versus: Interval
    verified: bool


@dataclass(kw_only=True)
class Choosing:
    """The state of choosing: the checks made so far, which outlive an interruption, and whom each was timed with."""

    trials: Sequence[TrialRecord]
    checks: list[VerificationRecord] = field(default_factory=list)
    rivals: dict[str, str] = field(default_factory=dict)

    def choose(self, prove: Prove, versus: Versus, has_time: Callable[[], bool]) -> Outcome:
        """Return the outcome of proving and timing; of the three candidates at most, later ones wait for time."""
        best = self._proven_best_baseline(prove)
        timed: Interval | None = None
        for place, contender in enumerate(self.open_contenders(best)[:_MAX_CONTENDERS]):
            if place > 0 and not has_time():
                break
            if not self._is_proven(contender, prove):
                continue
            timed = versus(contender, best)
            self.rivals[contender.name] = best.name
            self.checks = [
                replace(check, versus_baseline=timed) if check.name == contender.name else check
                for check in self.checks
            ]
            if decide(timed) == "improved":
                return Outcome(trial=contender, best=best, verdict="improved", versus=timed, verified=True)
            break
        return Outcome(trial=best, best=best, verdict=decide(timed), versus=versus_best(best, best), verified=True)

    def so_far(self) -> Outcome:
        """Return the outcome that the checks made so far allow: after an interruption nothing else is trained.

        A candidate counts as better only if the intervals of its trial and of the best baseline's leave no doubt.
        """
        sound = self.sound
        best = best_baseline(sound)
        for contender in contenders(sound, best):
            versus = self._timed(contender.name) or versus_best(contender, best)
            if contender.is_faithful and decide(versus) == "improved":
                return Outcome(
                    trial=contender, best=best, verdict="improved", versus=versus, verified=self._passed(contender.name)
                )
        return Outcome(
            trial=best,
            best=best,
            verdict="baseline",
            versus=versus_best(best, best),
            verified=best.name == "fp32" or self._passed(best.name),
        )

    def _proven_best_baseline(self, prove: Prove) -> TrialRecord:
        """Return the best baseline that passes; strict fp32 is the reference itself.

        One that is clearly faster and that its horizon could not judge is proven too: it would set the bar.
        """
        for trial in doubtful_baselines(self.sound, best_baseline(self.sound))[:_MAX_DOUBTFUL]:
            if self._is_proven(trial, prove):
                self._believe(trial)
                break
        while True:
            best = best_baseline(self.sound)
            if self._is_proven(best, prove):
                return best

    def _believe(self, trial: TrialRecord) -> None:
        """Take a trial for what its verification, on a longer horizon, found it to be."""
        assert trial.fidelity is not None
        fidelity = next(check.fidelity for check in self.checks if check.name == trial.name)
        judged = replace(trial, fidelity=fidelity or replace(trial.fidelity, verdict="faithful"))
        self.trials = [judged if each.number == trial.number else each for each in self.trials]

    def _is_proven(self, trial: TrialRecord, prove: Prove) -> bool:
        """Return whether the trial passes its verification, which is made once."""
        if trial.name == "fp32":
            return True
        if all(check.name != trial.name for check in self.checks):
            self.checks.append(prove(trial))
        return self._passed(trial.name)

    def open_contenders(self, best: TrialRecord) -> list[TrialRecord]:
        """Return the candidates that may beat `best` and that nothing speaks against so far, in the order to prove."""
        dismissed = self.dismissed
        return [trial for trial in contenders(self.trials, best) if trial.name not in dismissed]

    @property
    def dismissed(self) -> frozenset[str]:
        """Return the trials that failed their verification, or were no faster than a baseline beside it."""
        failed = {check.name for check in self.checks if not check.passed}
        return frozenset(failed | {name for name, best in self.rivals.items() if self._has_lost(name, best)})

    @property
    def sound(self) -> list[TrialRecord]:
        """Return the trials without those that failed their verification."""
        failed = {check.name for check in self.checks if not check.passed}
        return [trial for trial in self.trials if trial.name not in failed]

    def _passed(self, name: str) -> bool:
        return any(check.name == name and check.passed for check in self.checks)

    def _has_lost(self, name: str, best: str) -> bool:
        """Return whether a candidate was no faster than this very baseline when both were timed before."""
        timed = self._timed(name)
        return timed is not None and self.rivals.get(name) == best and decide(timed) != "improved"

    def _timed(self, name: str) -> Interval | None:
        return next((check.versus_baseline for check in self.checks if check.name == name), None)


def versus_best(trial: TrialRecord, best: TrialRecord) -> Interval:
    """Return the speed-up of `trial` over `best` as far as their own trials tell; 1 if they are the same."""
    assert trial.speedup is not None
    assert best.speedup is not None
    if trial.number != best.number:
        return ratio_of(trial.speedup, best.speedup)
    value, low, high = best.speedup.value, best.speedup.low, best.speedup.high
    return Interval(value=1.0, low=low / value, high=high / value)
