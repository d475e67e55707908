"""The budget of a run: wall-clock time for everything, and a number of trials."""

import time
from dataclasses import dataclass, field

from autoprec.search.objective import Protocol

MIN_HORIZON, MAX_HORIZON = 24, 200
_TRIALS_WANTED = 12  # whole ones; what is too slow or unfaithful ends early and costs less
_SEARCH_FRAC = 0.75


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Wall-clock seconds since `started` (of `time.monotonic`), and trials besides the baselines; None: no limit."""

    seconds: float
    trials: int | None = None
    started: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Return the seconds that are left; negative once they are over."""
        return self.started + self.seconds - time.monotonic()


def horizon_for(budget_s: float, step_s: float) -> int:
    """Return how many steps a trial may train so that enough trials, and the proof, fit into the budget."""
    steps = budget_s * _SEARCH_FRAC / (step_s * (2 * _TRIALS_WANTED + _PROOF_HORIZONS))
    return max(MIN_HORIZON, min(int(steps), MAX_HORIZON))


def trial_s(protocol: Protocol, step_s: float) -> float:
    """Return about how long one trial takes: a horizon of the candidate and one of FP32 beside it."""
    return 2 * protocol.horizon * step_s


def reserve_s(protocol: Protocol, step_s: float, budget_s: float) -> float:
    """Return the time to keep for the proof: at most half the budget."""
    return min(_PROOF_HORIZONS * protocol.horizon * step_s, budget_s / 2)


# FP32, the best baseline and a candidate over two horizons each, then two runs timed side by side over one.
_PROOF_HORIZONS = 8
