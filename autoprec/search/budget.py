"""The budget of a run: wall-clock time for everything, and a number of trials."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from autoprec.search.objective import Protocol

MIN_HORIZON, MAX_HORIZON = 24, 200
_TRIALS_WANTED = 12  # whole ones; what is too slow or unfaithful ends early and costs less
_SEARCH_FRAC = 0.75
# In horizons of FP32 steps. The proof: FP32, the best baseline and a candidate over two horizons each, then two runs
# timed side by side over one. The minimal result: two policies over two horizons each, then two runs over one.
_PROOF_HORIZONS, _BASELINE_HORIZONS, _MINIMAL_HORIZONS = 8, 2, 6
# Within this part of it a budget is taken for kept.
SLACK_FRAC = 0.1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Wall-clock seconds since `started` by the clock `now` (NaN: from here on), and trials besides the baselines."""

    seconds: float
    trials: int | None = None
    now: Callable[[], float] = time.monotonic
    started: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.started):
            object.__setattr__(self, "started", self.now())

    def left_s(self) -> float:
        """Return the seconds that are left; negative once they are over."""
        return self.started + self.seconds - self.now()

    @property
    def slack_s(self) -> float:
        """Return by how many seconds the budget may be missed."""
        return SLACK_FRAC * self.seconds


def horizon_for(budget_s: float, step_s: float) -> int:
    """Return how many steps a trial may train so that enough trials, and the proof, fit into the budget."""
    whole = 2 * _TRIALS_WANTED + _PROOF_HORIZONS + _MINIMAL_HORIZONS
    steps = budget_s * _SEARCH_FRAC / (step_s * whole)
    return max(MIN_HORIZON, min(int(steps), MAX_HORIZON))


def trial_s(protocol: Protocol, step_s: float) -> float:
    """Return about how long one trial takes: a horizon of the candidate and one of FP32 beside it."""
    return 2 * protocol.horizon * step_s


def proof_s(protocol: Protocol, step_s: float, *, with_baseline: bool = True) -> float:
    """Return about how long a proof takes; the best baseline needs none of its own where it is strict FP32."""
    horizons = _PROOF_HORIZONS - (0 if with_baseline else _BASELINE_HORIZONS)
    return horizons * protocol.horizon * step_s


def minimal_s(protocol: Protocol, step_s: float, budget_s: float) -> float:
    """Return the time to keep for making a winner smaller: at most a tenth of the budget."""
    return min(_MINIMAL_HORIZONS * protocol.horizon * step_s, budget_s / 10)


def minimal_trial_s(protocol: Protocol, step_s: float) -> float:
    """Return about how long one policy takes that may be smaller than the winner, timing what comes out included."""
    return (_MINIMAL_HORIZONS - 2) * protocol.horizon * step_s


def reserve_s(
    protocol: Protocol, step_s: float, budget: Budget, *, has_find: bool, with_baseline: bool = True
) -> float:
    """Return the time to keep while the search goes on: at most half the budget.

    With a find there is something to prove and to make smaller. Without one, only a find in the very next trial would
    need a proof: then the budget may be overrun by its slack.
    """
    proof = proof_s(protocol, step_s, with_baseline=with_baseline)
    wanted = proof + minimal_s(protocol, step_s, budget.seconds) if has_find else max(proof - budget.slack_s, 0.0)
    return min(wanted, budget.seconds / 2)
