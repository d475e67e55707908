"""Where the detectors of a guard speak up."""

import math
from dataclasses import dataclass

from autoprec.errors import GuardError


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardLimits:
    """Where detectors speak up; the defaults kept quiet on every healthy workload of the tests.

    `patience`: steps that are not finite, in a row, before more is done than a warning. `collapse_steps`: skipped
    steps in a row that are a collapse of the loss scale. `skipped_frac`: of the last `window` steps. `flush_frac`,
    `overflow_frac`: above the calibrated ones. `frozen_frac`: of a parameter's elements with a gradient, not moved by
    an update. `band`: standard deviations of the loss. `calm`: samples without a finding after which a detector begins
    with its first reaction again.

    Raises: `GuardError` for a limit that can never be met, or always is.
    """

    patience: int = 3
    collapse_steps: int = 12
    window: int = 200
    skipped_frac: float = 0.05
    flush_frac: float = 0.25
    overflow_frac: float = 0.001
    frozen_frac: float = 0.9
    band: float = 6.0
    calm: int = 20

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("patience", "collapse_steps", "window", "calm"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise GuardError(f"guard: limits.{name} is {getattr(self, name)!r}; allowed: whole numbers from 1")
        for name in ("skipped_frac", "flush_frac", "overflow_frac", "frozen_frac"):
            if not 0 < getattr(self, name) <= 1:
                raise GuardError(f"guard: limits.{name} is {getattr(self, name)!r}; allowed: fractions above 0 up to 1")
        if not 0 < self.band < math.inf:
            raise GuardError(f"guard: limits.band is {self.band!r}; allowed: numbers above 0")
