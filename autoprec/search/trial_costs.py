"""The cost model held against the trials of a run, which are timed anyway: nothing is measured for it."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from autoprec.policy import Policy
from autoprec.records.planner import PlannerRecord, TrialCostRecord
from autoprec.records.run import TrialRecord
from autoprec.search.cost_model import CostModel
from autoprec.search.trials import Catalog


def with_trial_errors(
    planner: PlannerRecord, catalog: Catalog, trials: Sequence[TrialRecord], fp32_step_s: float
) -> PlannerRecord:
    """Return the record with the error of the cost model for each trial that ran and can be predicted, FP32 left out.

    The model is calibrated on the FP32 step; a trial's step is that of FP32 over its speed-up within rounds.
    """
    if catalog.cost_model is None:
        return planner
    fp32 = next((trial for trial in trials if trial.name == "fp32" and trial.memory is not None), None)
    saved = None if fp32 is None or fp32.memory is None else fp32.memory.saved_bytes
    model = catalog.cost_model.calibrated(fp32_step_s, saved)
    errors = {}
    for trial in trials:
        if trial.speedup is None or trial.state == "duplicate" or trial.name == "fp32":
            continue
        policy = catalog.policy(trial.name, trial.choice)
        if _is_predicted(model, policy):
            errors[trial.name] = _error(model, policy, trial, fp32_step_s)
    times = [abs(each.time_error) for each in errors.values() if not each.is_bound]
    sizes = [abs(each.bytes_error) for each in errors.values() if each.bytes_error is not None]
    return replace(
        planner,
        trial_errors=errors,
        median_time_error=statistics.median(times) if times else None,
        median_bytes_error=statistics.median(sizes) if sizes else None,
    )


def _is_predicted(model: CostModel, policy: Policy) -> bool:
    """Return whether ops were timed as the policy runs them; a fused optimizer and another layout were not."""
    is_plain = policy.memory_format == policy.optimizer == "as_given"
    return is_plain and not model.unpredictable(policy)


def _error(model: CostModel, policy: Policy, trial: TrialRecord, fp32_step_s: float) -> TrialCostRecord:
    assert trial.speedup is not None
    predicted, step_s = model.predict_policy(policy), fp32_step_s / trial.speedup.value
    saved = 0 if trial.memory is None else trial.memory.saved_bytes
    return TrialCostRecord(
        step_s=step_s,
        predicted_step_s=predicted.step_s,
        time_error=predicted.step_s / step_s - 1,
        bytes_error=predicted.saved_bytes / saved - 1 if saved else None,
        spread=trial.speedup.spread,
        is_bound=predicted.is_bound,
    )
