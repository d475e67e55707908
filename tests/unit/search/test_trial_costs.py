"""The cost model held against trials."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.policy import Policy, preset
from autoprec.records.planner import PlannerRecord
from autoprec.records.run import TrialRecord
from autoprec.search.trial_costs import with_trial_errors
from autoprec.search.trials import Catalog
from tests.unit.records.samples import MEMORY, trial
from tests.unit.search.blocks import layout

BLANK = PlannerRecord(plans=(), num_signatures=1, num_from_cache=0, num_unmeasured=0, op_times_s=0.0)
BF16 = preset("low-bf16", "cpu")


class FakeModel:
    """Predicts the steps that it is told, in a step of 2 s in FP32; knows no TF32."""

    def __init__(self, **step_s: float) -> None:
        self.step_s, self.calibrated_on = step_s, ()

    def calibrated(self, *measured: float) -> "FakeModel":
        self.calibrated_on = measured  # type: ignore[assignment]
        return self

    def unpredictable(self, policy: Policy) -> str:
        return "" if policy.float32_matmul == "ieee" else "it is TF32 inside"

    def predict_policy(self, policy: Policy) -> Any:
        return SimpleNamespace(step_s=self.step_s[policy.name], saved_bytes=2400, is_bound=policy.name == "bound")


def baselines(*names: str) -> dict[str, Policy]:
    return {name: replace(BF16, name=name) for name in names}


def held(model: FakeModel, trials: list[TrialRecord], **policies: Policy) -> PlannerRecord:
    catalog = Catalog(
        baselines={**policies, "fp32": preset("fp32", "cpu")},
        layout=layout(),
        device={},
        cost_model=model,  # type: ignore[arg-type]
    )
    return with_trial_errors(BLANK, catalog, trials, 2.0)


def measured(name: str, speedup: float | None, **changes: Any) -> TrialRecord:
    return replace(trial(name, speedup, kind="baseline"), choice={}, **changes)


def test_every_trial_that_ran_is_held_against_its_prediction() -> None:
    model = FakeModel(a=1.1, b=0.9, c=1.2)
    trials = [
        measured("fp32", 1.0, memory=replace(MEMORY, saved_bytes=3000)),
        measured("a", 2.0, memory=replace(MEMORY, saved_bytes=2000)),
        measured("b", 2.0, memory=None, state="pruned"),
        measured("c", 1.0, memory=replace(MEMORY, saved_bytes=2500)),
    ]
    found = held(model, trials, **baselines("a", "b", "c"))
    assert model.calibrated_on == (2.0, 3000)
    assert {name: each.time_error for name, each in found.trial_errors.items()} == pytest.approx(
        {"a": 0.1, "b": -0.1, "c": -0.4}
    )
    assert [each.bytes_error for each in found.trial_errors.values()] == [
        pytest.approx(0.2),
        None,
        pytest.approx(-0.04),
    ]
    assert (found.median_time_error, found.median_bytes_error) == (pytest.approx(0.1), pytest.approx(0.12))
    assert found.trial_errors["a"].step_s == 1.0
    assert found.trial_errors["a"].spread == pytest.approx(0.005)


def test_bounds_and_what_did_not_run_or_was_not_timed_do_not_count() -> None:
    policies = baselines("bound", "slow", "twin", "tf32", "laid", "fused")
    policies["tf32"] = replace(policies["tf32"], float32_matmul="tf32")
    policies["laid"] = replace(policies["laid"], memory_format="channels_last")
    policies["fused"] = replace(policies["fused"], optimizer="fused")
    trials = [measured(name, None if name == "slow" else 2.0) for name in policies]
    trials = [replace(each, state="duplicate") if each.name == "twin" else each for each in trials]
    found = held(FakeModel(bound=3.0), trials, **policies)
    assert list(found.trial_errors) == ["bound"]
    assert found.median_time_error is None
    assert found.median_bytes_error is not None


def test_without_a_model_nothing_is_said() -> None:
    catalog = Catalog(baselines={}, layout=layout(), device={})
    assert with_trial_errors(BLANK, catalog, [measured("fp32", 1.0)], 2.0) is BLANK


def test_a_fused_optimizer_saves_what_it_saves_in_fp32() -> None:
    fp32 = replace(preset("fp32", "cpu"), name="fp32-fused", optimizer="fused")
    low = replace(BF16, name="low-fused", optimizer="fused")
    trials = [measured("low-fused", 2.0), measured("fp32-fused", 1.25)]  # 0.4 of 2 s are saved
    found = held(FakeModel(**{"low-fused": 1.5}), trials, **{"low-fused": low, "fp32-fused": fp32})
    (error,) = found.trial_errors.values()
    assert (error.step_s, error.predicted_step_s) == pytest.approx((1.0, 1.1))
    assert error.time_error == pytest.approx(0.1)
    unknown = held(FakeModel(**{"low-fused": 1.5}), trials[:1], **{"low-fused": low})
    assert unknown.trial_errors == {}, "what it saves was not measured"
    laid = replace(fp32, memory_format="channels_last")
    other = held(FakeModel(**{"low-fused": 1.5}), trials, **{"low-fused": low, "fp32-fused": laid})
    assert other.trial_errors == {}
