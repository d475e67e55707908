"""What reports show: numbers, units, order, and the JSON of the commands."""

import json
from dataclasses import replace

import pytest

from autoprec.records.run import Interval, RunRecord
from autoprec.report.views import best_line, headline, result_json, run_view, trial_line
from tests.unit.records.samples import FAITHFUL, MEMORY, RUN, trial

FINISHED = replace(RUN, interrupted=False)


def with_chosen(verdict: str, record: RunRecord = FINISHED, **changes: object) -> RunRecord:
    assert record.chosen is not None
    return replace(record, verdict=verdict, chosen=replace(record.chosen, **changes))  # type: ignore[arg-type]


def test_the_headline_says_what_was_gained_and_against_what() -> None:
    assert headline(FINISHED) == (
        "graph-pass-bf16 trains 1.40x as fast as fp32 and 1.16x as fast as autocast-bf16, the best baseline"
    )


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ("tie", "nothing is faster than autocast-bf16 beyond the spread; the policy is fp32"),
        ("baseline", "nothing beats autocast-bf16, the best baseline; the policy is fp32"),
    ],
)
def test_a_run_that_found_nothing_says_so(verdict: str, text: str) -> None:
    assert headline(with_chosen(verdict, name="fp32")) == text


def test_what_was_not_verified_is_called_so() -> None:
    assert headline(with_chosen("improved", RUN, verified=False)).endswith("not verified: the run was interrupted")


def test_baselines_keep_their_order_and_the_others_are_sorted_by_speed() -> None:
    trials = (
        *RUN.baselines,
        trial("slow", 1.1, number=2),
        trial("wrong", 3.0, number=3, verdict="unfaithful"),
        trial("fast", 1.4, number=4),
        trial("again", 1.4, number=5, state="duplicate"),
    )
    view = run_view(replace(FINISHED, trials=trials))
    assert [row.name for row in view.baselines] == ["fp32", "autocast-bf16"]
    assert [row.name for row in view.best] == ["fast", "slow", "wrong"]


def test_a_row_has_units_interval_fidelity_and_the_mark_of_what_is_written() -> None:
    row = run_view(FINISHED).best[0]
    assert (row.step, row.speedup, row.memory) == ("2.86 ms", "1.40x (1.39 to 1.41)", "18.6 KiB")
    assert row.fidelity == "faithful, 0.1 % lost"
    assert row.is_written
    assert row.note == "written because 1 step skipped by the loss scale"


def test_what_was_not_measured_is_a_dash() -> None:
    empty = replace(trial("x", None, number=9, state="failed"), step_s=None, fidelity=None, memory=None, num_skipped=0)
    row = run_view(replace(FINISHED, trials=(*RUN.baselines, empty))).best[0]
    assert (row.step, row.speedup, row.fidelity, row.memory, row.note) == ("-", "-", "-", "-", "because")


def test_kept_sites_have_a_reason_and_a_count() -> None:
    view = run_view(FINISHED)
    assert view.kept_title == "4 of 5 sites are assigned to a low format; kept in fp32:"
    assert [(row.sites, row.count, row.why) for row in view.kept] == [("*:softmax", "1 site", "logs of softmaxes")]


def test_the_proof_shows_verification_fidelity_and_memory() -> None:
    proof = dict(run_view(FINISHED).proof)
    assert proof["verification of graph-pass-bf16"] == (
        "passed with seed 4 over 80 steps: faithful; evaluate 0.51, fp32 0.5; "
        "1.16x (1.10 to 1.20) the best baseline, timed side by side"
    )
    assert proof["fidelity"] == FAITHFUL.reason
    assert proof["memory"] == "18.6 KiB for one copy, 1.00 times that of fp32"


def test_three_lines_of_code_use_the_policy() -> None:
    assert len(run_view(FINISHED).usage) == 3
    assert 'autoprec.apply(model, "policy.yaml")' in run_view(FINISHED).usage[1]
    assert run_view(replace(FINISHED, policy_file=None)).usage == ()


def test_json_has_the_fields_that_were_promised() -> None:
    result = result_json(FINISHED)
    assert result["policy"] == "policy.yaml"
    assert result["record"] == "runs/mlp/record.json"
    assert result["verdict"] == "improved"
    assert result["speedup_vs_fp32"] == 1.4
    assert result["speedup_vs_best_baseline"] == 1.16
    assert result["spread"] == pytest.approx(0.05 / 1.16)
    assert result["fidelity"]["verdict"] == "faithful"
    assert result["memory_bytes"] == MEMORY.total_bytes
    assert [each["name"] for each in result["baselines"]] == ["fp32", "autocast-bf16"]
    assert result["num_trials"] == 4
    assert result["wall_s"] == 12.5


def test_json_has_no_word_for_what_is_not_finite() -> None:
    wide = Interval(value=1.0, low=0.0, high=float("inf"))
    broken = replace(FAITHFUL, steps_lost_frac=float("inf"), upper_frac=float("nan"))
    record = with_chosen("improved", speedup_vs_best_baseline=wide)
    trials = tuple(replace(each, speedup=wide, fidelity=broken) for each in record.trials)
    text = json.dumps(result_json(replace(record, trials=trials, verification=())), allow_nan=False)
    assert json.loads(text)["spread"] is None


def test_progress_lines() -> None:
    assert trial_line(RUN.trials[2]) == ("trial 2 graph-pass-bf16: complete, 1.40x fp32, faithful, 0.1 % lost, because")
    assert best_line(RUN.trials[2]) == "best: graph-pass-bf16 1.40x fp32"
