"""What reports show: numbers, units, order, and the JSON of the commands."""

from dataclasses import replace

import pytest

from autoprec.records.run import KeptRecord, RunRecord
from autoprec.report.run_json import result_json
from autoprec.report.views import best_line, headline, run_view, trial_line
from tests.unit.records.samples import FAITHFUL, RUN, trial

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
        ("tie", "nothing is faster than autocast-bf16 beyond the spread; the policy is autocast-bf16"),
        ("baseline", "nothing beats autocast-bf16, the best baseline; the policy is autocast-bf16"),
    ],
)
def test_a_run_that_found_nothing_says_so(verdict: str, text: str) -> None:
    assert headline(with_chosen(verdict, name="autocast-bf16", trial=1)) == text


def wide_autocast() -> RunRecord:
    fp32, _, *others = FINISHED.trials
    return replace(
        FINISHED, trials=(fp32, trial("autocast-bf16", 1.47, kind="baseline", number=1, spread=1.3), *others)
    )


@pytest.mark.parametrize("verdict", ["tie", "baseline"])
def test_the_headline_says_why_the_nominally_fastest_baseline_is_not_written(verdict: str) -> None:
    record = with_chosen(verdict, wide_autocast(), name="fp32", trial=0, best_baseline="fp32")
    assert headline(record) == ("fp32 cannot be told from autocast-bf16 beyond the spread; the simpler fp32 is written")


def test_the_headline_names_a_baseline_that_only_its_spread_puts_first() -> None:
    record = with_chosen("improved", wide_autocast(), best_baseline="fp32")
    assert headline(record).endswith("as fast as fp32, the best baseline (that of autocast-bf16 is within its spread)")


def test_fp32_is_as_fast_as_itself_in_table_json_and_progress() -> None:
    noisy = trial("fp32", 1.25, kind="baseline", number=0, spread=0.25)
    record = replace(FINISHED, trials=(noisy, *FINISHED.trials[1:]))
    row = run_view(record).baselines[0]
    assert (row.speedup, row.step) == ("1.00x (0.80 to 1.20)", "4 ms")
    first = result_json(record)["baselines"][0]
    assert (first["speedup"], first["interval"]) == (1.0, [0.8, 1.2])
    assert trial_line(noisy).startswith("trial 0 fp32: complete, 1.00x (0.80 to 1.20), faithful")
    assert best_line(noisy) == "best: fp32 1.00x fp32"


def test_the_title_over_rows_says_what_they_are() -> None:
    assert run_view(replace(FINISHED, trials=FINISHED.trials[:3])).best_title == "Fastest of the search"
    assert run_view(FINISHED).best_title == "Other policies measured"
    assert run_view(replace(FINISHED, command="bench")).best_title == "Policy"
    assert run_view(FINISHED).baselines_title == "Baselines (step: at the pace of fp32 = 4 ms; lost: steps of training)"


@pytest.mark.parametrize(
    ("low", "kept", "title"),
    [
        (4, 1, "4 of 9 sites are assigned to a low format, 4 follow their inputs, 1 kept in fp32:"),
        (4, 4, "4 of 9 sites are assigned to a low format, 1 follows its inputs, 4 kept in fp32:"),
        (4, 0, "4 of 9 sites are assigned to a low format, 5 follow their inputs"),
        (9, 0, "9 of 9 sites are assigned to a low format"),
        (0, 0, "0 of 9 sites are assigned to a low format, 9 kept in fp32"),
        (6, 7, "6 of 9 sites are assigned to a low format, 3 kept in fp32:"),
    ],
)
def test_the_counts_of_sites_add_up(low: int, kept: int, title: str) -> None:
    rows = (KeptRecord(sites="*:softmax", num_sites=kept, why=""),) if kept else ()
    assert run_view(with_chosen("improved", low_sites=low, num_sites=9, kept=rows)).kept_title == title


def test_duplicates_are_not_counted_on_the_page_nor_in_json() -> None:
    record = replace(FINISHED, trials=(*FINISHED.trials, trial("again", 1.4, number=4, state="duplicate")))
    assert result_json(record)["num_trials"] == 4
    assert dict(run_view(record).facts)["measured"].startswith("4 policies in ")
    assert headline(replace(record, chosen=None)).startswith("mlp.py: 4 policies measured")


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


def test_what_was_only_predicted_does_not_count_as_measured() -> None:
    predicted = replace(trial("slow", None, state="pruned", number=9), num_steps=0, wall_s=0.0)
    facts = dict(run_view(FINISHED).facts)["measured"]
    more = dict(run_view(replace(FINISHED, trials=(*FINISHED.trials, predicted))).facts)["measured"]
    assert more == facts + (", " if ";" in facts else "; ") + "1 more not tried, as predicted to be too slow"


def test_where_fp32_is_the_best_baseline_the_headline_has_one_ratio() -> None:
    text = headline(with_chosen("improved", best_baseline="fp32"))
    assert text.startswith("graph-pass-bf16 trains 1.16x as fast as fp32, the best baseline")


def test_what_its_first_step_shows_to_be_fp32_has_no_steps_lost() -> None:
    settled = replace(FAITHFUL, steps_lost_frac=0.24, by_first_step=True)
    drifting = replace(trial("fp32-channels-last", 1.5), fidelity=settled)
    view = run_view(replace(FINISHED, trials=(*FINISHED.trials, drifting)))
    (row,) = [row for row in (*view.baselines, *view.best) if row.name == "fp32-channels-last"]
    assert row.steps_lost == "as fp32"
    assert "faithful, as fp32 by its first step" in trial_line(drifting)


def test_a_row_has_units_interval_fidelity_and_the_mark_of_what_is_written() -> None:
    row = run_view(FINISHED).best[0]
    assert (row.step, row.speedup, row.memory) == ("2.86 ms", "1.40x (1.39 to 1.41)", "18.6 KiB")
    assert row.steps_lost == "0.1 %"
    assert row.is_written
    assert row.note == "written; because; 1 step skipped by the loss scale"


def test_what_was_not_measured_is_a_dash() -> None:
    empty = replace(trial("x", None, number=9, state="failed"), step_s=None, fidelity=None, memory=None, num_skipped=0)
    row = run_view(replace(FINISHED, trials=(*RUN.baselines, empty))).best[0]
    assert (row.step, row.speedup, row.steps_lost, row.memory, row.note) == ("-", "-", "-", "-", "because")


def test_a_row_that_is_not_faithful_says_so() -> None:
    wrong = trial("wrong", 3.0, number=2, verdict="unfaithful")
    (row,) = run_view(replace(FINISHED, chosen=None, trials=(*RUN.baselines, wrong))).best
    assert row.note.startswith("unfaithful because;")
    (row,) = run_view(
        replace(FINISHED, chosen=None, trials=(*RUN.baselines, replace(wrong, reason="unfaithful beyond doubt")))
    ).best
    assert row.note.startswith("unfaithful beyond doubt;")


def test_kept_sites_have_a_reason_and_a_count() -> None:
    view = run_view(FINISHED)
    assert view.kept_title == "4 of 5 sites are assigned to a low format, 1 kept in fp32:"
    assert [(row.sites, row.count, row.why) for row in view.kept] == [("*:softmax", "1 site", "logs of softmaxes")]


def test_the_proof_shows_verification_fidelity_and_memory() -> None:
    proof = dict(run_view(FINISHED).proof)
    assert proof["verification of graph-pass-bf16"] == (
        "passed with seed 4 over 80 steps: faithful; evaluate 0.51, fp32 0.5; "
        "1.16x (1.10 to 1.20) the best baseline, timed side by side"
    )
    assert proof["fidelity"] == FAITHFUL.reason
    assert proof["memory"] == "17.6 KiB for one copy, 0.95 times that of fp32"


def test_three_lines_of_code_use_the_policy() -> None:
    assert len(run_view(FINISHED).usage) == 3
    assert 'autoprec.apply(model, "policy.yaml")' in run_view(FINISHED).usage[1]
    assert run_view(replace(FINISHED, policy_file=None)).usage == ()


def test_the_lines_to_paste_turn_a_fused_optimizer_on() -> None:
    chosen = FINISHED.chosen
    assert chosen is not None
    fused = replace(chosen, policy="autoprec: 1\nloss_scale: none\noptimizer: fused\noutputs: fp32\n")
    usage = run_view(replace(FINISHED, chosen=fused)).usage
    assert usage[2].startswith("optimizer = precision.optimizer(optimizer)")
    assert usage[3].endswith("loss.backward()")


def test_progress_lines() -> None:
    assert trial_line(RUN.trials[2]) == ("trial 2 graph-pass-bf16: complete, 1.40x fp32, faithful, 0.1 % lost, because")
    assert best_line(RUN.trials[2]) == "best: graph-pass-bf16 1.40x fp32"
