"""What a run record holds of the plans that a search began with, and of what they were made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class PlannerRecord:
    """The predicted fronts, the fastest plan of each format first. *Units*: seconds.

    `op_times_s` is the time that measuring ops and casts took in this run; `num_from_cache` of `num_signatures`
    different calls were known from earlier ones, and `num_unmeasured` were not reached.
    """

    plans: tuple[PlanRecord, ...]
    num_signatures: int
    num_from_cache: int
    num_unmeasured: int
    op_times_s: float
    errors: Mapping[str, SiteErrorsRecord] = field(default_factory=dict)
