"""Searching, proving and making the winner smaller, up to the end of the budget or to Ctrl-C."""

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.records.run import Interval, SearchEnd, TrialRecord, VerificationRecord
from autoprec.search.budget import Budget, minimal_s, minimal_trial_s, proof_s
from autoprec.search.choose import Choosing, Outcome
from autoprec.search.minimize import Bench, Minimal, minimized
from autoprec.search.objective import Objective
from autoprec.search.observer import Observer
from autoprec.search.plans import Plan, plans
from autoprec.search.prices import Prices
from autoprec.search.prove import Prover
from autoprec.search.study import Study
from autoprec.search.subject import Subject
from autoprec.search.trials import Catalog, has_time_to_search, pace_s, run_trials


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came out of a search, what ended it, and what is left of the winner that every part is needed of."""

    outcome: Outcome
    trials: tuple[TrialRecord, ...]
    checks: tuple[VerificationRecord, ...]
    ended: SearchEnd
    minimal: Minimal | None = None

    @property
    def interrupted(self) -> bool:
        """Return whether Ctrl-C ended it."""
        return self.ended == "interrupted"


def search_and_prove(
    study: Study, objective: Objective, prover: Prover, subject: Subject, budget: Budget, observer: Observer
) -> Found:
    """Search, prove the best of everything measured, and make it smaller; after Ctrl-C take what is known by then.

    Where the proof leaves time for more trials, because what it was kept for failed early, the search goes on.

    Raises: `KeyboardInterrupt` if not even the fp32 baseline is measured.
    """
    choosing, catalog = Choosing(trials=()), subject.catalog
    proving = _Proving(choosing=choosing, prover=prover, objective=objective, catalog=catalog, budget=budget)
    minimal: Minimal | None = None
    ended: SearchEnd
    try:
        outcome, ended = _searched(study, proving, plans(subject.rows), observer)
        if outcome.verdict == "improved":
            observer.stage("minimal result")
            minimal = _minimal(proving, outcome, observer)
    except KeyboardInterrupt:
        choosing.trials = study.trials()
        if not any(trial.name == "fp32" and trial.is_faithful for trial in choosing.trials):
            raise
        outcome, ended = choosing.so_far(), "interrupted"
    finally:
        objective.close()
    return Found(
        outcome=outcome, trials=tuple(choosing.trials), checks=tuple(choosing.checks), ended=ended, minimal=minimal
    )


def _minimal(proving: "_Proving", outcome: Outcome, observer: Observer) -> Minimal | None:
    """Return what is left of a winner; None where that could not be found out, and the winner stands."""
    try:
        return proving.minimize(outcome)
    except Exception as error:  # noqa: BLE001 kernels raise anything, and a proven winner must not be lost to it
        observer.note(f"the winner is written as it is: making it smaller ended with {type(error).__name__}: {error}")
        return None


def _searched(
    study: Study, proving: "_Proving", planned: Sequence[Plan], observer: Observer
) -> tuple[Outcome, SearchEnd]:
    """Return what was proven, and what ended the search; it goes on for as long as proofs leave time for new trials."""
    choosing, objective = proving.choosing, proving.objective
    while True:
        observer.stage("search")
        known = len(choosing.trials)
        ended = run_trials(study, objective, proving.catalog, planned, proving.budget, observer, choosing.dismissed)
        objective.close()  # the proof needs room for two other runs
        observer.stage("proof")
        choosing.trials = study.trials()
        outcome = proving.choose()
        is_new = len(choosing.trials) > known
        if ended != "budget" or outcome.verdict == "improved" or not is_new or not proving.leaves_time():
            return outcome, ended
        objective.reopen()


@dataclass(frozen=True, kw_only=True)
class _Proving:
    """What a proof and what comes after it may cost, by the budget that is left."""

    choosing: Choosing
    prover: Prover
    objective: Objective
    catalog: Catalog
    budget: Budget

    @property
    def _step_s(self) -> float:
        return pace_s(self.objective, self.choosing.trials)

    def choose(self) -> Outcome:
        """Return the outcome of proving what was found; later candidates are tried while there is time for a proof."""
        needed = proof_s(self.objective.protocol, self._step_s) / 2  # the reference is there

        def has_time() -> bool:
            return self.budget.left_s() + self.budget.slack_s > needed

        while True:
            outcome = self.choosing.choose(self._prove, self._versus, has_time)
            if outcome.verdict == "improved" or not self.choosing.open_contenders(outcome.best) or not has_time():
                return outcome

    def leaves_time(self) -> bool:
        """Return whether there is time for one more trial and its proof."""
        open_trials = [each for each in self.choosing.trials if each.name not in self.choosing.dismissed]
        return has_time_to_search(self.objective, self.budget, open_trials)

    def minimize(self, outcome: Outcome) -> Minimal | None:
        """Return the winner without what it does not need."""
        protocol, step_s = self.objective.protocol, self._step_s
        model = self.catalog.cost_model
        needed = minimal_trial_s(protocol, step_s)
        bench = Bench(
            prove=lambda name, policy: self.prover.prove(name, policy, chaotic=_is_chaotic(outcome.trial)),
            versus=lambda ours, bar: self.prover.versus(ours, bar, max_s=self._timing_s(0.0)),
            has_time=lambda: self.budget.left_s() > needed,
            memory=self.prover.memory,
        )
        return minimized(
            outcome,
            self.catalog,
            bench,
            Prices(model=None if model is None else model.calibrated(self.objective.step_s)),
        )

    def _prove(self, trial: TrialRecord) -> VerificationRecord:
        return self.prover.prove(trial.name, self._policy(trial), chaotic=_is_chaotic(trial))

    def _versus(self, trial: TrialRecord, best: TrialRecord) -> Interval:
        kept = minimal_s(self.objective.protocol, self._step_s, self.budget.seconds)
        return self.prover.versus(self._policy(trial), self._policy(best), max_s=self._timing_s(kept))

    def _timing_s(self, kept_s: float) -> float:
        """Return how long two policies may be timed: what is left but `kept_s`, and half the slack in any case."""
        return max(self.budget.left_s() - kept_s, self.budget.slack_s / 2)

    def _policy(self, trial: TrialRecord) -> Policy:
        return self.catalog.policy(trial.name, trial.choice)


def _is_chaotic(trial: TrialRecord) -> bool:
    """Return whether the search had to widen its margin for a trial."""
    return trial.fidelity is not None and trial.fidelity.margin > trial.fidelity.margin_asked
