"""What a run record holds of the plans that a search began with, and of what they were made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field


def minimal_name(winner: str) -> str:
    """Return the name under which what is left of a winner is verified."""
    return f"{winner}-minimal"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """One predicted plan: the sites that run low, the seconds a step saves by it, and its relative gradient error."""

    low: str
    num_low_sites: int
    saved_s: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteErrorsRecord:
    """How the errors of sites in one format came about: groups measured one by one, of how many.

    `rank_correlation` is Spearman's, of measured errors with first-order estimates; None where too few were compared.
    """

    num_units: int
    num_measured: int
    rank_correlation: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimalRecord:
    """What was tried to make the winner smaller: groups of FP32 sites, then settings.

    `num_trials` were verified by training. `removed` were taken out; `needed` says what each of the others is needed
    for, as far as it was tried alone. `memory_bytes` is what one copy of a run holds without them. Without `is_whole`
    the time was over before all were tried. `reason` says why the winner was kept after all.
    """

    num_groups: int
    num_trials: int
    removed: tuple[str, ...] = ()
    needed: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True
    reason: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCostRecord:
    """The step time of one trial as predicted and as measured, at the pace of FP32 over the run. *Units*: seconds.

    `time_error` and `bytes_error`, that of what is saved for the backward pass, are predicted over measured, less one.
    `spread` is half the 95 % interval of the measured time, as a fraction: no smaller error can be seen. Where
    `is_bound` is set, the prediction is a lower bound.
    """

    step_s: float
    predicted_step_s: float
    time_error: float
    bytes_error: float | None
    spread: float
    is_bound: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerRecord:
    """The predicted fronts, the fastest plan of each format first. *Units*: seconds.

    `notes` say what the budget left out. `trial_errors` hold the cost model against every trial that ran and whose ops
    were timed; the medians are of absolute errors, bounds left out, None where there are none.
    `op_times_s` is the time that measuring ops and casts took in this run; `num_from_cache` of `num_signatures`
    different calls were known from earlier ones, and `num_unmeasured` were not reached.
    """

    plans: tuple[PlanRecord, ...]
    num_signatures: int
    num_from_cache: int
    num_unmeasured: int
    op_times_s: float
    errors: Mapping[str, SiteErrorsRecord] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    trial_errors: Mapping[str, TrialCostRecord] = field(default_factory=dict)
    median_time_error: float | None = None
    median_bytes_error: float | None = None
