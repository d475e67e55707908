"""The JSON of `tune` and `bench`."""

import json
from dataclasses import replace

import pytest

from autoprec.records.run import Interval
from autoprec.report.run_json import result_json, trial_json
from tests.unit.records.samples import FAITHFUL, RUN

FINISHED = replace(RUN, interrupted=False)


def test_json_has_the_fields_that_were_promised() -> None:
    result = result_json(FINISHED)
    assert result["policy"] == "policy.yaml"
    assert result["record"] == "runs/mlp/record.json"
    assert result["verdict"] == "improved"
    assert result["speedup_vs_fp32"] == 1.4
    assert result["speedup_vs_best_baseline"] == 1.16
    assert result["spread"] == pytest.approx(0.05 / 1.16)
    assert result["fidelity"]["verdict"] == "faithful"
    assert result["memory_bytes"] == 18000  # of what is left of the winner
    assert (result["taken_out"], result["search_ended"]) == (["*:layer_norm"], "exhausted")
    assert result["median_time_error"] == 0.05
    assert [each["name"] for each in result["baselines"]] == ["fp32", "autocast-bf16"]
    assert result["num_trials"] == 4
    assert result["wall_s"] == 12.5


def test_json_has_no_word_for_what_is_not_finite() -> None:
    wide = Interval(value=1.0, low=0.0, high=float("inf"))
    broken = replace(FAITHFUL, steps_lost_frac=float("inf"), upper_frac=float("nan"))
    assert FINISHED.chosen is not None
    record = replace(FINISHED, chosen=replace(FINISHED.chosen, speedup_vs_best_baseline=wide))
    trials = tuple(replace(each, speedup=wide, fidelity=broken) for each in record.trials)
    text = json.dumps(result_json(replace(record, trials=trials, verification=())), allow_nan=False)
    assert json.loads(text)["spread"] is None


def test_a_trial_has_its_steps_as_they_were_timed_and_those_of_fp32_beside_it() -> None:
    found = trial_json(RUN.trials[1])
    assert (found["step_s"], found["reference_step_s"]) == (0.002, 0.004)
