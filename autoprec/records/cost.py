"""What a run record holds of the cost model: how it was come by, and how far off it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class CostErrorRecord:
    """The step time and the saved bytes of one policy, as predicted and as measured.

    `time_error` and `bytes_error` are predicted over measured, less one. `spread` is half the 95 % interval of the
    measured time over FP32, as a fraction of it: no smaller error can be seen. With `is_bound` the prediction is a
    lower bound: it has an op so slow that it was not timed twice.
    """

    step_s: float
    predicted_step_s: float
    time_error: float
    saved_bytes: int
    predicted_saved_bytes: int
    bytes_error: float
    spread: float = 0.0
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModelRecord:
    """The cost model of a run. *Units*: seconds.

    `measured_s` is the wall time that op times took, `num_from_cache` counts signatures that were known from earlier
    runs, `num_unmeasured` those the budget did not reach. `overhead_s` was calibrated on the FP32 step. The medians are
    of absolute relative errors over the policies of `errors` whose prediction is no bound, FP32 left out; None where
    there are none.
    """

    num_signatures: int
    num_from_cache: int
    num_unmeasured: int
    measured_s: float
    overhead_s: float
    median_error: float | None
    median_bytes_error: float | None
    errors: Mapping[str, CostErrorRecord] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
