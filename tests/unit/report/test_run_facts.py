"""What a run says of what it looked at, how well it predicted, and what it took out."""

from dataclasses import replace

import pytest

from autoprec.records.planner import MinimalRecord
from autoprec.records.run import UNPROVEN, KeptRecord, RunRecord
from autoprec.report.run_facts import run_facts
from autoprec.report.run_json import result_json
from autoprec.report.views import run_view
from tests.unit.records.samples import RUN


def fact(record: RunRecord, label: str) -> str | None:
    return dict(run_facts(record)).get(label)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("budget", None),
        ("interrupted", None),
        (None, None),
        ("trials", "ended with the number of trials that was asked for"),
        ("exhausted", "ended before the budget was spent: the space has nothing new that is worth a trial"),
    ],
)
def test_what_ended_the_search_is_said_unless_it_was_the_budget(end: str | None, text: str | None) -> None:
    assert fact(replace(RUN, search_ended=end), "search") == text  # type: ignore[arg-type]


def test_the_error_of_predictions_counts_trials_that_are_no_bound() -> None:
    assert RUN.planner is not None
    (bound,) = RUN.planner.trial_errors.values()
    errors = {"a": replace(bound, is_bound=False), "b": bound, "c": replace(bound, is_bound=False)}
    record = replace(RUN, planner=replace(RUN.planner, trial_errors=errors))
    assert fact(record, "predictions") == "step times are off by 5 % (median of 2 trials), saved bytes by 2 %"
    nothing = replace(RUN, planner=replace(RUN.planner, median_time_error=None))
    assert fact(nothing, "predictions") is None


def test_what_the_budget_left_out_is_said() -> None:
    assert fact(RUN, "not timed") == "1 op, for lack of time: they stay in fp32 in plans"
    assert fact(RUN, "left out") == "fp16: what it breaks"
    assert RUN.planner is not None
    whole = replace(RUN, planner=replace(RUN.planner, num_unmeasured=0, notes=()))
    assert (fact(whole, "not timed"), fact(whole, "left out")) == (None, None)
    assert fact(replace(RUN, planner=None), "planned") is None


def test_what_was_taken_out_is_said() -> None:
    assert fact(RUN, "taken out") == (
        "*:layer_norm: not needed (2 policies verified); the time was over before all was tried"
    )
    kept = MinimalRecord(num_groups=3, num_trials=1, reason="it was slower")
    assert fact(replace(RUN, minimal=kept), "taken out") == "nothing (1 policy verified): it was slower"
    assert fact(replace(RUN, minimal=None), "taken out") is None


def test_what_is_left_of_a_winner_is_shown_with_its_own_proof_and_memory() -> None:
    (check,) = RUN.verification
    assert check.fidelity is not None
    own = replace(check, name="graph-pass-bf16-minimal", fidelity=replace(check.fidelity, reason="its own"))
    record = replace(RUN, verification=(check, own), interrupted=False)
    assert dict(run_view(record).proof)["fidelity"] == "its own"
    assert result_json(record)["memory_bytes"] == 18000
    assert "17.6 KiB" in dict(run_view(record).proof)["memory"]
    whole = replace(record, minimal=None)
    assert dict(run_view(whole).proof)["fidelity"] == check.fidelity.reason
    assert result_json(whole)["memory_bytes"] == 19000


def test_kept_sites_have_a_price() -> None:
    (row,) = run_view(RUN).kept
    assert (row.sites, row.price, row.why) == ("*:softmax", "0.8 % of a step", "logs of softmaxes")
    assert RUN.chosen is not None
    for frac in (None, -0.01):
        kept = tuple(replace(each, price_frac=frac) for each in RUN.chosen.kept)
        (row,) = run_view(replace(RUN, chosen=replace(RUN.chosen, kept=kept))).kept
        assert row.price == ""


def test_what_runs_low_in_spite_of_a_mark_says_which_trial_showed_that_it_can() -> None:
    assert fact(RUN, "low in spite of a mark") is None
    assert RUN.chosen is not None
    lowered = (KeptRecord(sites="*.norm:mul", num_sites=2, why="measured faithful: trial 7; marked: cancels"),)
    record = replace(RUN, chosen=replace(RUN.chosen, lowered=lowered))
    assert fact(record, "low in spite of a mark") == "*.norm:mul: measured faithful: trial 7; marked: cancels"


def test_what_was_not_tried_says_why() -> None:
    untried = replace(RUN.trials[-1], state="pruned", num_steps=0, wall_s=0.0)
    slow, marked = (replace(untried, number=9, reason=reason) for reason in ("predicted to be 9x slower", UNPROVEN))
    text = fact(replace(RUN, trials=(*RUN.trials, slow, slow, marked)), "measured")
    assert text is not None
    assert text.endswith("2 more not tried, as predicted to be too slow, 1 more not tried, as marks forbid them")
