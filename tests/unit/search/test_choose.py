"""Choosing what is written, on injected measurements, proofs and timings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoprec.records.run import Interval, TrialRecord, VerificationRecord
from autoprec.search.choose import Choosing, Outcome
from tests.unit.records.samples import trial

FP32 = trial("fp32", 1.0, kind="baseline", number=0)
AUTOCAST = trial("autocast-bf16", 1.5, kind="baseline", number=1)
FASTER = trial("faster", 2.0, number=2)
FAST = trial("fast", 1.8, number=3)
ALL = (FP32, AUTOCAST, FASTER, FAST)


class Bench:
    """Proofs and timings as told; counts what was asked."""

    def __init__(
        self, failing: Sequence[str] = (), versus: Mapping[str, tuple[float, float, float]] | None = None
    ) -> None:
        self.failing, self.versus_of, self.proved, self.timed = failing, versus or {}, [], []  # type: ignore[var-annotated]

    def prove(self, each: TrialRecord) -> VerificationRecord:
        self.proved.append(each.name)
        return VerificationRecord(name=each.name, passed=each.name not in self.failing, reason="", seed=1, horizon=80)

    def versus(self, each: TrialRecord, best: TrialRecord) -> Interval:
        self.timed.append((each.name, best.name))
        value, low, high = self.versus_of.get(each.name, (1.2, 1.1, 1.3))
        return Interval(value=value, low=low, high=high)


def choose(trials: Sequence[TrialRecord], bench: Bench, *, has_time: bool = True) -> Outcome:
    return Choosing(trials=trials).choose(bench.prove, bench.versus, lambda: has_time)


def test_the_fastest_is_proven_timed_against_the_best_baseline_and_written() -> None:
    bench = Bench()
    outcome = choose(ALL, bench)
    assert (outcome.trial.name, outcome.verdict, outcome.best.name) == ("faster", "improved", "autocast-bf16")
    assert outcome.verified
    assert outcome.versus.value == 1.2
    assert bench.timed == [("faster", "autocast-bf16")]


def test_if_the_fastest_fails_its_proof_the_next_is_tried() -> None:
    outcome = choose(ALL, Bench(failing=("faster",)))
    assert (outcome.trial.name, outcome.verdict) == ("fast", "improved")


def test_without_time_only_the_first_candidate_is_tried() -> None:
    outcome = choose(ALL, Bench(failing=("faster",)), has_time=False)
    assert (outcome.trial.name, outcome.verdict) == ("autocast-bf16", "baseline")


def test_a_tie_writes_the_baseline() -> None:
    outcome = choose(ALL, Bench(versus={"faster": (1.01, 0.97, 1.05)}))
    assert (outcome.trial.name, outcome.verdict) == ("autocast-bf16", "tie")
    assert outcome.versus.value == 1.0


def test_a_candidate_that_turns_out_slower_leaves_the_baseline() -> None:
    outcome = choose(ALL, Bench(versus={"faster": (0.9, 0.85, 0.95)}))
    assert (outcome.trial.name, outcome.verdict) == ("autocast-bf16", "baseline")


def test_a_baseline_that_fails_its_proof_sets_no_bar_and_is_not_written() -> None:
    slower = trial("slower", 1.2, number=4)
    outcome = choose((FP32, AUTOCAST, slower), Bench(failing=("autocast-bf16",)))
    assert (outcome.trial.name, outcome.best.name, outcome.verdict) == ("slower", "fp32", "improved")


def test_strict_fp32_is_left_when_everything_fails() -> None:
    bench = Bench(failing=("autocast-bf16", "faster", "fast"))
    outcome = choose(ALL, bench)
    assert (outcome.trial.name, outcome.verdict, outcome.verified) == ("fp32", "baseline", True)
    assert "fp32" not in bench.proved


def test_nothing_is_proven_twice() -> None:
    bench = Bench(versus={"faster": (1.0, 0.9, 1.1)})
    choose(ALL, bench)
    assert len(bench.proved) == len(set(bench.proved))


def test_of_baselines_that_cannot_be_told_apart_fp32_is_written_as_fast_as_itself() -> None:
    noisy = trial("fp32", 1.02, kind="baseline", number=0, spread=0.05)
    wide = trial("autocast-bf16", 1.47, kind="baseline", number=1, spread=1.31)
    for outcome in (choose((noisy, wide), Bench()), Choosing(trials=(noisy, wide)).so_far()):
        assert (outcome.trial.name, outcome.best.name, outcome.verdict) == ("fp32", "fp32", "baseline")
        assert outcome.versus.value == 1.0
        assert outcome.trial.speedup is not None
        assert outcome.trial.speedup.value == 1.0


def test_a_baseline_with_a_wide_interval_does_not_keep_candidates_from_being_tried() -> None:
    wide = trial("autocast-bf16", 1.47, kind="baseline", number=1, spread=1.31)
    outcome = choose((FP32, wide, trial("steady", 1.3, number=2)), Bench())
    assert (outcome.trial.name, outcome.best.name, outcome.verdict) == ("steady", "fp32", "improved")


def test_after_an_interruption_a_clear_winner_is_written_unverified() -> None:
    outcome = Choosing(trials=ALL).so_far()
    assert (outcome.trial.name, outcome.verdict, outcome.verified) == ("faster", "improved", False)


def test_after_an_interruption_a_doubtful_winner_is_not_written() -> None:
    doubtful = trial("doubtful", 1.51, number=2, spread=0.1)
    outcome = Choosing(trials=(FP32, AUTOCAST, doubtful)).so_far()
    assert (outcome.trial.name, outcome.verified) == ("autocast-bf16", False)


def test_after_an_interruption_the_checks_made_count() -> None:
    failed = VerificationRecord(name="faster", passed=False, reason="", seed=1, horizon=80)
    passed = VerificationRecord(name="fast", passed=True, reason="", seed=1, horizon=80)
    outcome = Choosing(trials=ALL, checks=[failed, passed]).so_far()
    assert (outcome.trial.name, outcome.verified) == ("fast", True)


def test_an_unsure_trial_is_not_written_without_its_proof() -> None:
    unsure = trial("unsure", 3.0, number=5, verdict="inconclusive")
    assert Choosing(trials=(FP32, unsure)).so_far().trial.name == "fp32"
    assert choose((FP32, unsure), Bench()).trial.name == "unsure"


def doubtful(name: str, speedup: float, number: int) -> TrialRecord:
    sure = trial(name, speedup, kind="baseline", number=number)
    assert sure.fidelity is not None
    return replace(sure, fidelity=replace(sure.fidelity, verdict="inconclusive"))


def test_a_baseline_that_its_horizon_could_not_judge_is_proven_if_it_would_set_the_bar() -> None:
    bench = Bench()
    outcome = choose((FP32, doubtful("fp32-channels-last", 1.9, 1), FAST), bench)
    assert bench.proved == ["fp32-channels-last"]
    assert (outcome.trial.name, outcome.verdict, outcome.best.name) == (
        "fp32-channels-last", "baseline", "fp32-channels-last",
    )  # fmt: skip


def test_a_doubtful_baseline_that_fails_or_is_no_faster_sets_no_bar() -> None:
    outcome = choose((FP32, doubtful("a", 1.9, 1), FAST), Bench(failing=("a",)))
    assert (outcome.trial.name, outcome.best.name) == ("fast", "fp32")
    bench = Bench()
    choose((FP32, AUTOCAST, doubtful("slower", 1.2, 2)), bench)
    assert "slower" not in bench.proved
