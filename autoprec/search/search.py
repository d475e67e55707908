"""Searching and proving, up to the end of the budget or to Ctrl-C."""

from dataclasses import dataclass

from autoprec.records.run import Interval, TrialRecord, VerificationRecord
from autoprec.search.budget import Budget
from autoprec.search.choose import Choosing, Outcome
from autoprec.search.objective import Objective
from autoprec.search.observer import Observer
from autoprec.search.plans import plans
from autoprec.search.prove import Prover
from autoprec.search.study import Study
from autoprec.search.subject import Subject
from autoprec.search.trials import Catalog, run_trials


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came out of a search, and whether Ctrl-C ended it."""

    outcome: Outcome
    trials: tuple[TrialRecord, ...]
    checks: tuple[VerificationRecord, ...]
    interrupted: bool


def search_and_prove(
    study: Study, objective: Objective, prover: Prover, subject: Subject, budget: Budget, observer: Observer
) -> Found:
    """Search, then prove the best of everything measured; after Ctrl-C take what is known by then.

    Raises: `KeyboardInterrupt` if not even the fp32 baseline is measured.
    """
    choosing, catalog = Choosing(trials=()), subject.catalog
    try:
        observer.stage("search")
        run_trials(study, objective, catalog, plans(subject.rows), budget, observer)
        objective.close()  # the proof needs room for two other runs
        observer.stage("proof")
        choosing.trials = study.trials()
        outcome = _choose(choosing, prover, catalog, budget)
        interrupted = False
    except KeyboardInterrupt:
        choosing.trials = study.trials()
        if not any(trial.name == "fp32" and trial.is_faithful for trial in choosing.trials):
            raise
        outcome, interrupted = choosing.so_far(), True
    finally:
        objective.close()
    return Found(outcome=outcome, trials=tuple(choosing.trials), checks=tuple(choosing.checks), interrupted=interrupted)


def _choose(choosing: Choosing, prover: Prover, catalog: Catalog, budget: Budget) -> Outcome:
    def prove(trial: TrialRecord) -> VerificationRecord:
        widened = trial.fidelity is not None and trial.fidelity.margin > trial.fidelity.margin_asked
        return prover.prove(trial.name, catalog.policy(trial.name, trial.choice), chaotic=widened)

    def versus(trial: TrialRecord, best: TrialRecord) -> Interval:
        ours, bar = (catalog.policy(each.name, each.choice) for each in (trial, best))
        return prover.versus(ours, bar, max_s=max(budget.left_s(), budget.seconds / 10))

    return choosing.choose(prove, versus, lambda: budget.left_s() > 0)
