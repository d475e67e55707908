"""What a search makes small, and the Pareto front of what it measured: time, memory and predicted gradient error."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

from autoprec.records.run import FidelityRecord, TrialRecord
from autoprec.search.decide import speedup_of

Aim: TypeAlias = Literal["time", "pareto"]

GOALS: Mapping[Aim, tuple[str, ...]] = MappingProxyType(
    {"time": ("step-time ratio",), "pareto": ("step-time ratio", "memory", "gradient error")}
)
_MIN_VIOLATION, _MAX_VIOLATION = 1e-6, 1e6


def goals(trial: TrialRecord, aim: Aim) -> tuple[float, ...] | None:
    """Return what a trial came to in each goal, smaller is better; None where one is not known or not finite."""
    speedup = speedup_of(trial)
    if speedup is None:
        return None
    ratio = 1 / speedup.value
    if aim == "time":
        return (ratio,)
    error = trial.gradient_error
    if trial.memory is None or error is None or not math.isfinite(error):
        return None
    return ratio, float(trial.memory.total_bytes), error


def pareto_front(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the faithful trials that no other one is as good as in all three goals, the fastest first.

    Of trials that are equal in all goals, the first one counts.
    """
    known = [(goals(trial, "pareto"), trial) for trial in trials if trial.is_faithful]
    found = sorted((values, trial.number, trial) for values, trial in known if values is not None)
    front: list[tuple[tuple[float, ...], TrialRecord]] = []
    for values, _, trial in found:  # whatever dominates a trial comes before it
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in front):
            front.append((values, trial))
    return tuple(trial for _, trial in front)


def violation(fidelity: FidelityRecord) -> float:
    """Return how far a trial is from being faithful, 0 or less if it is, within what storages can hold."""
    excess = fidelity.upper_frac - fidelity.margin
    if fidelity.passed:
        return min(excess, 0.0)
    return max(min(excess, _MAX_VIOLATION), _MIN_VIOLATION) if math.isfinite(excess) else _MAX_VIOLATION
