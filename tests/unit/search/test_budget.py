"""What the budget is spent on, by a clock that trials and proofs move."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.policy import Policy
from autoprec.records.run import Interval, SearchEnd, TrialRecord, VerificationRecord
from autoprec.search import trials
from autoprec.search.budget import Budget, horizon_for, minimal_s, proof_s, reserve_s
from autoprec.search.observer import Observer
from autoprec.search.plans import plans
from autoprec.search.search import Found, search_and_prove
from autoprec.search.study import Asked
from autoprec.search.trials import Catalog, run_trials
from tests.unit.records.samples import MEMORY, trial
from tests.unit.search.blocks import rows
from tests.unit.search.memory import keep_studies_in_memory
from tests.unit.search.test_study import start
from tests.unit.search.test_trials import CATALOG, FakeObjective

HORIZON, STEP_S = 50, 0.01  # a trial takes a second
BUDGET_S = 26.0  # for which a horizon of 50 is chosen
PROTOCOL: Any = SimpleNamespace(horizon=HORIZON, num_rounds=4, slow_limit=2.0)


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_studies_in_memory(monkeypatch)


@dataclass
class Clock:
    """A clock that stands still until something takes time."""

    s: float = 0.0

    def __call__(self) -> float:
        return self.s


@dataclass
class Objective(FakeObjective):
    """Trials of a second each."""

    clock: Clock = None  # type: ignore[assignment]
    num_reopened: int = 0

    def measure(self, asked: Asked, policy: Policy, key: str, report: Callable[[int, float], bool]) -> TrialRecord:
        self.clock.s += 2 * HORIZON * STEP_S
        return replace(super().measure(asked, policy, key, report), wall_s=2 * HORIZON * STEP_S, num_steps=HORIZON)

    def close(self) -> None:
        """Free nothing."""

    def reopen(self) -> None:
        self.num_reopened += 1


@dataclass
class Prover:
    """Proofs of `prove_s`, timings of what they are given."""

    clock: Clock
    passes: Callable[[str], bool] = lambda _: True
    prove_s: float = 4 * HORIZON * STEP_S
    versus_speedup: float = 1.2

    def prove(self, name: str, policy: Policy, *, chaotic: bool) -> VerificationRecord:
        assert not chaotic
        self.clock.s += self.prove_s
        return VerificationRecord(name=name, passed=self.passes(name), reason="told so", seed=1, horizon=2 * HORIZON)

    def versus(self, policy: Policy, bar: Policy, max_s: float) -> Interval:
        self.clock.s += min(max_s, 2 * HORIZON * STEP_S)
        value = self.versus_speedup
        return Interval(value=value, low=value - 0.01, high=value + 0.01)

    def memory(self, policy: Policy) -> Any:
        return MEMORY


def objective(outcome: Callable[[Asked], TrialRecord], clock: Clock) -> Objective:
    return Objective(outcome, step_s=STEP_S, protocol=PROTOCOL, clock=clock)


def as_fast_as(speedup: float) -> Callable[[Asked], TrialRecord]:
    """Return the outcome of trials in which everything but the baselines has this speed-up."""
    return lambda asked: replace(trial(asked.name, 1.0 if asked.kind == "baseline" else speedup), duplicate_of=None)


def search(folder: Path, measured: Objective, seconds: float, catalog: Catalog = CATALOG) -> SearchEnd:
    budget = Budget(seconds=seconds, now=measured.clock)
    return run_trials(start(folder), measured, catalog, plans(rows())[:2], budget, Observer())  # type: ignore[arg-type]


def whole(folder: Path, measured: Objective, prover: Prover, seconds: float) -> Found:
    subject = SimpleNamespace(catalog=CATALOG, rows=rows())
    budget = Budget(seconds=seconds, now=measured.clock)
    return search_and_prove(start(folder), measured, prover, subject, budget, Observer())  # type: ignore[arg-type]


def test_the_horizon_of_these_tests_is_that_of_their_budget() -> None:
    assert horizon_for(BUDGET_S, STEP_S) in range(HORIZON, HORIZON + 3)


def test_a_budget_starts_when_it_is_made() -> None:
    clock = Clock(s=7.0)
    budget = Budget(seconds=10, now=clock)
    clock.s = 9.0
    assert (budget.started, budget.left_s(), budget.slack_s) == (7.0, 8.0, 1.0)


def test_time_is_kept_for_what_is_still_to_be_proven() -> None:
    budget = Budget(seconds=100, now=Clock())
    proof = proof_s(PROTOCOL, STEP_S)
    assert reserve_s(PROTOCOL, STEP_S, budget, has_find=True) == proof + minimal_s(PROTOCOL, STEP_S, 100)
    assert reserve_s(PROTOCOL, STEP_S, budget, has_find=True, with_baseline=False) < proof + minimal_s(
        PROTOCOL, STEP_S, 100
    )
    assert reserve_s(PROTOCOL, STEP_S, budget, has_find=False) == max(proof - 10, 0)
    assert reserve_s(PROTOCOL, 100.0, budget, has_find=True) == 50


def test_a_search_that_finds_nothing_goes_on_to_the_end_of_the_budget(tmp_path: Path) -> None:
    clock = Clock()
    assert search(tmp_path, objective(as_fast_as(0.8), clock), BUDGET_S) == "budget"
    assert 0.9 * BUDGET_S <= clock.s <= 1.1 * BUDGET_S


def test_a_search_that_finds_something_leaves_the_time_of_its_proof(tmp_path: Path) -> None:
    clock = Clock()
    assert search(tmp_path, objective(as_fast_as(1.2), clock), BUDGET_S) == "budget"
    budget = Budget(seconds=BUDGET_S, now=Clock())
    kept = reserve_s(PROTOCOL, STEP_S, budget, has_find=True, with_baseline=False)  # fp32 is the best one
    assert kept <= BUDGET_S - clock.s <= kept + 1


def test_a_run_with_a_find_ends_with_its_budget(tmp_path: Path) -> None:
    clock = Clock()
    found = whole(tmp_path, objective(as_fast_as(1.2), clock), Prover(clock), BUDGET_S)
    assert (found.outcome.verdict, found.ended, found.interrupted) == ("improved", "budget", False)
    assert found.minimal is not None
    assert found.minimal.record.num_trials > 0
    assert 0.9 * BUDGET_S <= clock.s <= 1.1 * BUDGET_S


def test_a_winner_is_not_lost_to_what_making_it_smaller_raises(tmp_path: Path) -> None:
    class Failing(Prover):
        def memory(self, policy: Policy) -> Any:
            raise RuntimeError("out of luck")

    class Watch(Observer):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    clock = Clock()
    budget, subject = Budget(seconds=8, trials=2, now=clock), SimpleNamespace(catalog=CATALOG, rows=rows())
    measured = objective(as_fast_as(1.2), clock)
    found = search_and_prove(start(tmp_path), measured, Failing(clock, prove_s=0.1), subject, budget, Watch())  # type: ignore[arg-type]
    assert (found.outcome.verdict, found.minimal) == ("improved", None)
    assert notes == ["the winner is written as it is: making it smaller ended with RuntimeError: out of luck"]


def test_where_proofs_fail_early_the_search_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    measured = objective(as_fast_as(1.2), clock)
    found = whole(tmp_path, measured, Prover(clock, passes=lambda _: False, prove_s=0.1), BUDGET_S)
    assert measured.num_reopened > 0
    assert (found.outcome.verdict, found.outcome.trial.name) == ("baseline", "fp32")
    assert 0.9 * BUDGET_S <= clock.s <= 1.1 * BUDGET_S


def test_a_candidate_that_lost_beside_the_baseline_is_not_timed_again(tmp_path: Path) -> None:
    clock = Clock()
    measured = objective(as_fast_as(1.2), clock)
    prover = Prover(clock, prove_s=0.1, versus_speedup=1.0)
    found = whole(tmp_path, measured, prover, BUDGET_S)
    assert found.outcome.verdict in ("tie", "baseline")
    assert 0.9 * BUDGET_S <= clock.s <= 1.1 * BUDGET_S
    timed = [check for check in found.checks if check.versus_baseline is not None]
    assert len({check.name for check in timed}) == len(timed) > 1


def test_a_pace_slower_than_at_the_start_is_reckoned_with(tmp_path: Path) -> None:
    clock = Clock()
    measured = objective(as_fast_as(1.2), clock)
    measured.step_s = STEP_S / 10  # the machine was quiet when FP32 was timed
    search(tmp_path, measured, BUDGET_S)
    budget = Budget(seconds=BUDGET_S, now=Clock())
    kept = reserve_s(PROTOCOL, STEP_S, budget, has_find=True, with_baseline=False)
    assert BUDGET_S - clock.s >= kept


def test_a_search_in_which_all_is_ruled_out_ends_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_IDLE_PROPOSALS", 4)
    clock = Clock()
    model = SimpleNamespace(slowdown=lambda policy, step_s: None if policy.name == "fp32" else 9.0)
    measured = objective(as_fast_as(1.2), clock)
    end = search(tmp_path, measured, 1e6, replace(CATALOG, cost_model=model))  # type: ignore[arg-type]
    assert end == "exhausted"
    assert [name for name, _ in measured.measured] == ["fp32"]


def test_a_number_of_trials_ends_the_search(tmp_path: Path) -> None:
    clock = Clock()
    measured = objective(as_fast_as(1.2), clock)
    budget = Budget(seconds=1e6, trials=2, now=clock)
    assert run_trials(start(tmp_path), measured, CATALOG, (), budget, Observer()) == "trials"  # type: ignore[arg-type]
