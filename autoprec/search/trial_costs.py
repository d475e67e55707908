"""The cost model held against the trials of a run, which are timed anyway: nothing is measured for it."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from autoprec.policy import Policy, resolve
from autoprec.records.planner import PlannerRecord, TrialCostRecord
from autoprec.records.run import TrialRecord
from autoprec.search.cost_model import CostModel
from autoprec.search.trials import Catalog


def with_trial_errors(
    planner: PlannerRecord, catalog: Catalog, trials: Sequence[TrialRecord], fp32_step_s: float
) -> PlannerRecord:
    """Return the record with the error of the cost model for each trial that ran and can be predicted, FP32 left out.

    The model is calibrated on the FP32 step; a trial's step is that of FP32 over its speed-up within rounds. A fused
    optimizer steps on FP32 parameters whatever sites run low, so it saves what it was measured to save in FP32.
    """
    if catalog.cost_model is None:
        return planner
    fp32 = next((trial for trial in trials if trial.name == "fp32" and trial.memory is not None), None)
    saved = None if fp32 is None or fp32.memory is None else fp32.memory.saved_bytes
    model = catalog.cost_model.calibrated(fp32_step_s, saved)
    timed = [trial for trial in trials if trial.speedup and trial.state != "duplicate" and trial.name != "fp32"]
    policies = {trial.name: catalog.policy(trial.name, trial.choice) for trial in timed}
    fused = next((trial for trial in timed if _is_fused_fp32(policies[trial.name], catalog)), None)
    fused_s = None if fused is None else fp32_step_s - _step_s(fused, fp32_step_s)
    errors = {}
    for trial in timed:
        saved_s = fused_s if policies[trial.name].optimizer == "fused" else 0.0
        if trial is not fused and saved_s is not None and _is_predicted(model, policies[trial.name]):
            errors[trial.name] = _error(model, policies[trial.name], trial, fp32_step_s, saved_s)
    times = [abs(each.time_error) for each in errors.values() if not each.is_bound]
    sizes = [abs(each.bytes_error) for each in errors.values() if each.bytes_error is not None]
    return replace(
        planner,
        trial_errors=errors,
        median_time_error=statistics.median(times) if times else None,
        median_bytes_error=statistics.median(sizes) if sizes else None,
    )


def _is_predicted(model: CostModel, policy: Policy) -> bool:
    """Return whether ops were timed as the policy runs them; in another layout they were not."""
    return policy.memory_format == "as_given" and not model.unpredictable(policy)


def _is_fused_fp32(policy: Policy, catalog: Catalog) -> bool:
    """Return whether a policy is FP32 with a fused optimizer, and nothing else."""
    is_plain = policy.memory_format == policy.compile == "as_given" and policy.float32_matmul == "ieee"
    is_fused = policy.optimizer == "fused" and is_plain
    return is_fused and set(resolve(policy, catalog.sites).formats.values()) == {"fp32"}


def _step_s(trial: TrialRecord, fp32_step_s: float) -> float:
    assert trial.speedup is not None
    return fp32_step_s / trial.speedup.value


def _error(model: CostModel, policy: Policy, trial: TrialRecord, fp32_step_s: float, fused_s: float) -> TrialCostRecord:
    assert trial.speedup is not None
    predicted, step_s = model.predict_policy(policy), _step_s(trial, fp32_step_s)
    predicted_s = predicted.step_s - fused_s
    saved = 0 if trial.memory is None else trial.memory.saved_bytes
    return TrialCostRecord(
        step_s=step_s,
        predicted_step_s=predicted_s,
        time_error=predicted_s / step_s - 1,
        bytes_error=predicted.saved_bytes / saved - 1 if saved else None,
        spread=trial.speedup.spread,
        is_bound=predicted.is_bound,
    )
