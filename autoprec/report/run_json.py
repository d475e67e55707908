"""What `--json` prints, computed from a record alone."""

import math
from typing import Any

from autoprec.records.run import FidelityRecord, Interval, RunRecord, TrialRecord
from autoprec.report.run_facts import measured_trials
from autoprec.report.views import proven_fidelity, written_bytes
from autoprec.search.decide import speedup_of


def result_json(record: RunRecord) -> dict[str, Any]:
    """Return what `autoprec tune --json` prints."""
    chosen = record.chosen
    trial = next((each for each in record.trials if chosen is not None and each.number == chosen.trial), None)
    versus = None if chosen is None else chosen.speedup_vs_best_baseline
    return {
        "schema_version": 1,
        "policy": record.policy_file,
        "record": record.record_file,
        "name": None if chosen is None else chosen.name,
        "verdict": record.verdict,
        "verified": chosen is not None and chosen.verified,
        "interrupted": record.interrupted,
        "speedup_vs_fp32": None if chosen is None else _value(chosen.speedup_vs_fp32),
        "speedup_vs_best_baseline": _value(versus),
        "best_baseline": None if chosen is None else chosen.best_baseline,
        "spread": None if versus is None else _finite(versus.spread),
        "fidelity": _fidelity_json(proven_fidelity(record, trial)),
        "memory_bytes": written_bytes(record, trial),
        "baselines": [trial_json(each) for each in record.baselines],
        "num_trials": len(measured_trials(record)),
        "taken_out": [] if record.minimal is None else list(record.minimal.removed),
        "front": [
            {
                "name": point.name,
                "policy": point.policy_file,
                "speedup_vs_fp32": point.speedup.value,
                "memory_bytes": point.memory_bytes,
                "gradient_error": point.gradient_error,
            }
            for point in record.front
        ],
        "search_ended": record.search_ended,
        "median_time_error": None if record.planner is None else record.planner.median_time_error,
        "wall_s": record.wall_s,
    }


def bench_json(record: RunRecord) -> dict[str, Any]:
    """Return what `autoprec bench --json` prints."""
    return {
        "schema_version": 1,
        "workload": record.workload,
        "record": record.record_file,
        "policy": next(trial_json(each) for each in record.trials if each.kind == "policy"),
        "baselines": [trial_json(each) for each in record.baselines],
        "wall_s": record.wall_s,
    }


def trial_json(trial: TrialRecord) -> dict[str, Any]:
    """Return one trial as `--json` prints it: the steps as they were timed, those of FP32 beside it too."""
    speedup = speedup_of(trial)
    return {
        "name": trial.name,
        "state": trial.state,
        "reason": trial.reason,
        "step_s": trial.step_s,
        "reference_step_s": trial.reference_step_s,
        "speedup": _value(speedup),
        "interval": None if speedup is None else [_finite(speedup.low), _finite(speedup.high)],
        "emulated": list(trial.emulated),
        "fidelity": _fidelity_json(trial.fidelity),
        "memory_bytes": None if trial.memory is None else trial.memory.total_bytes,
        "num_skipped": trial.num_skipped,
    }


def _fidelity_json(fidelity: FidelityRecord | None) -> dict[str, Any] | None:
    if fidelity is None:
        return None
    fractions = ("steps_lost_frac", "upper_frac", "margin", "power_frac", "chaos_frac")
    return {
        "verdict": fidelity.verdict,
        **{key: _finite(getattr(fidelity, key)) for key in fractions},
        "horizon": fidelity.horizon,
        "by_first_step": fidelity.by_first_step,
        "reason": fidelity.reason,
    }


def _value(interval: Interval | None) -> float | None:
    return None if interval is None else interval.value


def _finite(value: float) -> float | None:
    """Return None for what JSON has no word for."""
    return value if math.isfinite(value) else None
