"""The study: queue, outcomes, resumption, and storages that cannot be used."""

import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autoprec.errors import StudyError
from autoprec.records.run import Interval, TrialRecord
from autoprec.search import storage as storage_file
from autoprec.search.lock import run_lock
from autoprec.search.study import Asked, Study, open_study, stored_horizon
from tests.unit.records.samples import FAITHFUL, trial
from tests.unit.search.blocks import rows
from tests.unit.search.memory import keep_studies_in_memory

ROOT = Path(__file__).parents[3]

IDENTITY: Mapping[str, str | int | float] = {"graph": "abc", "seed": 0, "horizon": 40}


def start(folder: Path, *, name: str = "mlp", **changes: str | float) -> Study:
    return open_study(
        f"sqlite:///{folder / 'study.db'}",
        name,
        identity={**IDENTITY, **changes},
        rows=rows(),
        seed=0,
        note=lambda _: None,
    )


def measured(
    asked: Asked, speedup: float | None = 1.25, *, state: str = "complete", verdict: str = "faithful"
) -> TrialRecord:
    return replace(
        trial(asked.name, speedup, kind=asked.kind, number=asked.number, state=state, verdict=verdict),
        choice=asked.choice,
        key=f"key-{asked.number}",
        duplicate_of=None,
    )


def test_baselines_have_no_choice_and_come_first(tmp_path: Path) -> None:
    study = start(tmp_path)
    study.enqueue("baseline", "fp32", {})
    study.enqueue("plan", "p", {"low": "fp16"})
    first, second = study.ask(), study.ask()
    assert (first.kind, first.name, first.choice) == ("baseline", "fp32", {})
    assert (second.kind, second.name, second.choice["low"]) == ("plan", "p", "fp16")


def test_a_plan_that_is_there_is_not_enqueued_again(tmp_path: Path) -> None:
    study = start(tmp_path)
    for _ in range(2):
        study.enqueue("baseline", "fp32", {})
    study.tell(measured(study.ask()))
    study.enqueue("baseline", "fp32", {})
    assert not study.has_waiting("baseline")


def test_a_study_remembers_the_fp32_curve(tmp_path: Path) -> None:
    start(tmp_path).remember_curve([2.0, 1.5, 1.25])
    start(tmp_path).remember_curve([2.001, 1.5, 1.25])
    message = r"FP32 loss of step 2 was 1.5 then and is 1.4 now, so data, loss, optimizer .* pass another --study NAME"
    with pytest.raises(StudyError, match=message):
        start(tmp_path).remember_curve([2.0, 1.4, 1.25])


def test_the_sampler_proposes_values_of_the_space_and_the_loss_scale_for_fp16_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_studies_in_memory(monkeypatch)
    study = start(tmp_path)
    values = {row.name: row.values for row in rows()}
    for number in range(25):
        asked = study.ask()
        assert asked.kind == "search"
        assert all(value in values[name] for name, value in asked.choice.items())
        assert ("loss_scale.initial" in asked.choice) == (asked.choice["low"] == "fp16")
        study.report(asked, 0, 0.8)
        study.tell(measured(asked, 1 + number / 100))


def test_records_survive_the_study(tmp_path: Path) -> None:
    study = start(tmp_path)
    study.enqueue("baseline", "fp32", {})
    record = replace(measured(study.ask()), losses=(1.0, float("nan"), float("inf")))
    study.tell(record)
    (back,) = start(tmp_path).trials()
    assert str(back) == str(record)  # nan differs from itself


@pytest.mark.parametrize(
    ("state", "speedup", "expected"),
    [
        ("complete", 1.25, optuna.trial.TrialState.COMPLETE),
        ("pruned", 0.5, optuna.trial.TrialState.PRUNED),
        ("failed", None, optuna.trial.TrialState.FAIL),
    ],
)
def test_optuna_sees_states_step_time_ratios_and_constraints(
    tmp_path: Path, state: str, speedup: float | None, expected: optuna.trial.TrialState
) -> None:
    study = start(tmp_path)
    study.tell(measured(study.ask(), speedup, state=state, verdict="unfaithful"))
    (stored,) = optuna.load_study(study_name="mlp", storage=f"sqlite:///{tmp_path / 'study.db'}").trials
    assert stored.state == expected
    assert stored.value == (0.8 if state == "complete" else None)
    assert stored.constraints["fidelity"] > 0


def test_a_faithful_trial_is_feasible_and_a_divergence_is_storable(tmp_path: Path) -> None:
    study = start(tmp_path)
    study.tell(measured(study.ask()))
    broken = replace(FAITHFUL, verdict="unfaithful", upper_frac=float("inf"))
    study.tell(replace(measured(study.ask()), fidelity=broken))
    first, second = optuna.load_study(study_name="mlp", storage=f"sqlite:///{tmp_path / 'study.db'}").trials
    assert first.constraints["fidelity"] <= 0 < second.constraints["fidelity"]


def test_a_trial_much_slower_than_the_best_is_pruned_and_one_as_fast_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_studies_in_memory(monkeypatch)
    study = start(tmp_path)
    best = study.ask()
    for number in range(12):
        assert not study.report(best, number, 0.8 + number / 1000)
    study.tell(measured(best))
    slow, equal = study.ask(), study.ask()
    assert any(study.report(slow, number, 1.1 + number / 1000) for number in range(12))
    assert not any(study.report(equal, number, 0.8 + (5 * number + 6) % 12 / 1000) for number in range(12))


def test_a_duplicate_gets_the_outcome_of_its_original(tmp_path: Path) -> None:
    study = start(tmp_path)
    asked = study.ask()
    study.report(asked, 0, 0.75)
    original = measured(asked)
    study.tell(original)
    copy = study.tell_duplicate(study.ask(), original)
    assert (copy.state, copy.duplicate_of, copy.speedup) == ("duplicate", 0, original.speedup)
    _, stored = optuna.load_study(study_name="mlp", storage=f"sqlite:///{tmp_path / 'study.db'}").trials
    assert (stored.value, stored.intermediate_values) == (0.8, {0: 0.75})


@pytest.mark.parametrize("state", ["pruned", "failed"])
def test_a_duplicate_of_an_unfinished_trial_has_no_value(tmp_path: Path, state: str) -> None:
    study = start(tmp_path)
    original = measured(study.ask(), None, state=state)
    study.tell(original)
    study.tell_duplicate(study.ask(), original)
    assert optuna.load_study(study_name="mlp", storage=f"sqlite:///{tmp_path / 'study.db'}").trials[1].value is None


def test_an_interrupted_trial_is_asked_again_with_its_choice(tmp_path: Path) -> None:
    study = start(tmp_path)
    study.enqueue("plan", "p", {"low": "fp16", "family:matmul": "fp32"})
    asked = study.ask()
    study.put_back(asked)
    again = study.ask()
    assert (again.kind, again.name) == ("plan", "p")
    assert again.choice["family:matmul"] == "fp32"
    assert again.number != asked.number


def test_putting_back_what_was_told_changes_nothing(tmp_path: Path) -> None:
    study = start(tmp_path)
    asked = study.ask()
    study.tell(measured(asked))
    study.put_back(asked)
    assert not study.has_waiting("search")


def test_a_trial_that_a_crash_left_running_is_asked_again(tmp_path: Path) -> None:
    study = start(tmp_path)
    sampled = study.ask()
    resumed = start(tmp_path)
    again = resumed.ask()
    assert resumed.resumed
    assert (again.name, again.choice) == (sampled.name, sampled.choice)


def test_a_resumed_study_draws_new_choices(tmp_path: Path) -> None:
    study = start(tmp_path)
    first = study.ask()
    study.tell(measured(first))
    second = start(tmp_path).ask()
    assert second.choice != first.choice


def test_a_study_of_something_else_is_not_resumed(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(StudyError, match=r"graph: 'abc' then, 'xyz' now.*--study NAME or --run-dir"):
        start(tmp_path, graph="xyz")
    start(tmp_path, name="other", graph="xyz")


def test_a_study_made_by_others_is_not_touched(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=storage, study_name="mlp")
    with pytest.raises(StudyError, match="not made by autoprec"):
        start(tmp_path)
    assert optuna.load_study(study_name="mlp", storage=storage).user_attrs == {}


def test_a_study_of_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path)
    monkeypatch.setattr(storage_file, "SCHEMA_VERSION", 7)
    with pytest.raises(StudyError, match="schema 1, and this autoprec reads 7"):
        start(tmp_path)


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("these are notes, not a study\n" * 100)
    with pytest.raises(StudyError, match="not a database"):
        start(tmp_path)
    assert (tmp_path / "study.db").read_text().startswith("these are notes")


def test_a_database_of_another_program_is_refused_and_kept(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "study.db")
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    with pytest.raises(StudyError, match="bookmarks"):
        start(tmp_path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]
    connection.close()


def test_a_locked_study_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_file, "_BUSY_TIMEOUT_S", 0.05)
    study = start(tmp_path)
    connection = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StudyError, match=r"locked.*another program holds it"):
        study.ask()
    with pytest.raises(StudyError, match="locked"):
        start(tmp_path)
    connection.close()


@pytest.mark.parametrize("storage", ["nosuchdb://x", "notaurl", "mysql+nodriver://h/d"])
def test_a_storage_that_cannot_be_opened_is_reported(storage: str) -> None:
    with pytest.raises(StudyError, match="sqlite:///FILE"):
        open_study(storage, "n", identity=IDENTITY, rows=rows(), seed=0, note=lambda _: None)


def test_the_horizon_of_a_stored_study_is_known(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    assert stored_horizon(storage, "mlp") is None
    assert not (tmp_path / "study.db").exists()
    start(tmp_path)
    assert stored_horizon(storage, "mlp") == 40
    assert stored_horizon(storage, "other") is None


def test_a_study_that_cannot_be_used_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    with pytest.raises(StudyError, match="sqlite:///FILE"):
        stored_horizon("foo", "mlp")
    optuna.create_study(storage=storage, study_name="theirs")
    with pytest.raises(StudyError, match="not made by autoprec"):
        stored_horizon(storage, "theirs")
    monkeypatch.setattr(storage_file, "_BUSY_TIMEOUT_S", 0.05)
    start(tmp_path)  # from now on readers get by the lock of a writer
    connection = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StudyError, match=r"locked.*another program holds it"):
        stored_horizon(storage, "mlp")
    connection.close()


def test_optuna_is_silent_and_its_warnings_are_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        study = open_study(
            f"sqlite:///{tmp_path / 'study.db'}", "n", identity=IDENTITY, rows=rows(), seed=0, note=notes.append
        )
        study.tell(measured(study.ask()))
    optuna.logging.get_logger("optuna.study").warning("something odd")
    assert notes == ["something odd"]
    assert capsys.readouterr() == ("", "")


HOLD = """
import sys
from pathlib import Path
from autoprec.search.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, **pipes) as other:
        assert other.stdout.readline() == "holds\n"
        with pytest.raises(StudyError, match=rf"process {other.pid}.*--run-dir"), run_lock(tmp_path):
            pass
    with run_lock(tmp_path):
        pass


def test_the_interval_of_a_ratio_has_a_spread() -> None:
    assert Interval(value=2.0, low=1.8, high=2.2).spread == pytest.approx(0.1)
