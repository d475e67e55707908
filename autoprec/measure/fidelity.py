"""Fidelity: does a candidate train as FP32 does? The verdict, with its numbers and its limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from autoprec.errors import MeasurementError, WorkloadError
from autoprec.measure.series import MIN_LENGTH
from autoprec.measure.steps_lost import (
    Pair,
    Trend,
    bounds,
    loses_less_than,
    loses_more_than,
    outgrows,
    pair,
    power,
    trend,
)

Verdict: TypeAlias = Literal["faithful", "unfaithful", "inconclusive"]

DEFAULT_MARGIN = 0.01
MIN_HORIZON = 2 * MIN_LENGTH
# hopeless() ends a trial for good, so it asks for far more than a verdict does:
_HOPELESS_CONFIDENCE = 0.999
_HOPELESS_MARGINS = 3.0
_HOPELESS_MIN_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """Steps a candidate lost against its paired FP32 run; a negative number was gained.

    `lower_frac` and `upper_frac` are one-sided 95 % bounds of `steps_lost_frac`, a fraction of `horizon`. `margin` is
    `margin_asked`, plus `chaos_frac` where FP32 nudged by one rounding moves further than that. `power_frac` is the
    smallest loss of steps that this comparison would have seen in 80 % of cases. `curve_falls` is False where the slope
    of the FP32 curve drowns in its noise; steps are then counted at the smallest slope this noise lets one see.
    A run that broke down has infinite steps lost. `by_first_step`: the curves cannot tell, and what a first step
    computes was held against FP32 instead; see `search.same_arithmetic`.
    """

    verdict: Verdict
    reason: str
    horizon: int
    steps_lost: float
    steps_lost_frac: float
    lower_frac: float
    upper_frac: float
    margin: float
    margin_asked: float
    chaos_frac: float
    power_frac: float
    curve_falls: bool
    trend: Trend
    by_first_step: bool = False


def compare(
    reference: Sequence[float],
    candidate: Sequence[float],
    *,
    margin: float = DEFAULT_MARGIN,
    chaos: Sequence[float] | None = None,
) -> Fidelity:
    """Return how faithfully `candidate` follows `reference`: losses of paired runs in low precision and in FP32.

    `margin` is the fraction of steps that may be lost. `chaos` is the curve of an FP32 run whose initial weights were
    nudged by one rounding of the low format. A candidate better than FP32 passes. One that reached a loss that is not
    finite fails, and may be shorter. The bounds hold for one look; looking again at a longer run adds to the error.

    Raises: `WorkloadError` if the FP32 run or its nudged copy reached a loss that is not finite;
    `MeasurementError` if the curves have fewer than `MIN_HORIZON` steps or different lengths, or for a margin <= 0.
    """
    if not 0 < margin < 1:
        raise MeasurementError(f"fidelity: margin {margin} is not a fraction of steps between 0 and 1, such as 0.01")
    _check_finite(reference, "FP32 run")
    broken_at = _first_non_finite(candidate)
    if broken_at is not None:
        return _failed(len(reference), margin, f"the loss is {candidate[broken_at]} at step {broken_at + 1}")
    _check_lengths(reference, candidate, "candidate")
    if _diverged(reference, candidate):
        return _failed(len(reference), margin, _divergence(reference, candidate))
    chaos_frac = 0.0 if chaos is None else _chaos(reference, chaos, margin)
    widened = margin + chaos_frac if chaos_frac > margin else margin
    both = pair(reference, candidate, widened)
    growth = trend(both)
    lower, upper = bounds(both)
    verdict = _verdict(both, growth, widened)
    return Fidelity(
        verdict=verdict,
        reason=_reason(verdict, both, growth, widened, margin),
        horizon=both.horizon,
        steps_lost=both.steps,
        steps_lost_frac=both.steps / both.horizon,
        lower_frac=lower / both.horizon,
        upper_frac=upper / both.horizon,
        margin=widened,
        margin_asked=margin,
        chaos_frac=chaos_frac,
        power_frac=power(both) / both.horizon,
        curve_falls=both.falls,
        trend=growth,
    )


def hopeless(
    reference_so_far: Sequence[float],
    candidate_so_far: Sequence[float],
    margin: float = DEFAULT_MARGIN,
    *,
    horizon: int | None = None,
) -> bool:
    """Return whether it is practically certain that the candidate fails, so that its trial can end now.

    True for a loss that is not finite, a diverged run, or steps lost whose 99.9 % lower bound is above three times
    what the margin allows at `horizon`, the steps of the full run (None: the run ends here). A loss scale that skips
    the first ten steps loses ten steps and no more, so pass the horizon. False says nothing about a candidate.

    Raises: `WorkloadError` if the FP32 run reached a loss that is not finite.
    """
    _check_finite(reference_so_far, "FP32 run")
    if _first_non_finite(candidate_so_far) is not None:
        return True
    length = min(len(reference_so_far), len(candidate_so_far))
    if length < _HOPELESS_MIN_STEPS:
        return False
    reference, candidate = reference_so_far[:length], candidate_so_far[:length]
    if _diverged(reference, candidate):
        return True
    allowed = _HOPELESS_MARGINS * margin * max(length, horizon or 0)
    return loses_more_than(allowed, pair(reference, candidate, margin), _HOPELESS_CONFIDENCE)


def _verdict(both: Pair, growth: Trend, margin: float) -> Verdict:
    allowed = margin * both.horizon
    if loses_more_than(allowed, both) or (growth.grows and outgrows(margin, both)):
        return "unfaithful"
    if loses_less_than(allowed, both) and not _grows_out(growth, margin):
        return "faithful"
    return "inconclusive"


def _grows_out(growth: Trend, margin: float) -> bool:
    return growth.grows and growth.projected_frac > margin


def _reason(verdict: Verdict, both: Pair, growth: Trend, margin: float, margin_asked: float) -> str:
    """Return the verdict as one sentence with its numbers."""
    lower, upper = (steps / both.horizon for steps in bounds(both))
    limit = f"margin {_percent(margin)}"
    if margin > margin_asked:
        limit += f", widened from {_percent(margin_asked)} because FP32 nudged by one rounding moves as far"
    lost = f"{_percent(both.steps / both.horizon)} of {both.horizon} steps lost"
    if not both.falls:
        lost += ", counted at the smallest slope that its noise shows because the FP32 curve does not visibly fall"
    grows = f"the difference grows, to {_percent(growth.projected_frac)} after two horizons (p = {growth.p_value:.1g})"
    if verdict == "faithful":
        seen = f"this run could have seen {_percent(power(both) / both.horizon)}"
        return f"faithful: {lost}, at most {_percent(upper)} ({limit}); {seen}"
    if verdict == "unfaithful":
        sure = loses_more_than(margin * both.horizon, both)
        return f"unfaithful: {lost}, {f'at least {_percent(lower)}' if sure else grows} ({limit})"
    if _grows_out(growth, margin):
        return f"inconclusive: {lost}, {grows} ({limit}); train longer"
    between = f"between {_percent(lower)} and {_percent(upper)}"
    return f"inconclusive: {lost}, {between} ({limit}); train longer or on larger batches"


def _percent(frac: float) -> str:
    return f"{100 * frac:.3g}%"


def _chaos(reference: Sequence[float], nudged: Sequence[float], margin: float) -> float:
    """Return the fraction of steps by which a nudge alone moves FP32, either way; after two horizons if that grows."""
    _check_finite(nudged, "nudged FP32 run")
    _check_lengths(reference, nudged, "nudged FP32 run")
    both = pair(reference, nudged, margin)
    growth = trend(both)
    moved = abs(both.steps) / both.horizon
    return max(moved, growth.projected_frac) if growth.grows else moved


def _diverged(reference: Sequence[float], candidate: Sequence[float]) -> bool:
    """Return whether the candidate ends above FP32 by more than FP32 ever moved, and by a tenth of its size."""
    moved = max(reference) - min(reference)
    return _final_excess(reference, candidate) > max(moved, 0.1 * max(abs(loss) for loss in reference))


def _divergence(reference: Sequence[float], candidate: Sequence[float]) -> str:
    excess, moved = _final_excess(reference, candidate), max(reference) - min(reference)
    return f"diverged: the loss ends {excess:.3g} above FP32, whose whole run moved it by {moved:.3g}"


def _final_excess(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """Return the median difference over the last quarter: what one spike cannot move."""
    count = max(len(reference) // 4, 1)
    return float(np.median(np.subtract(candidate[-count:], reference[-count:])))


def _failed(horizon: int, margin: float, why: str) -> Fidelity:
    return Fidelity(
        verdict="unfaithful",
        reason=f"unfaithful: {why}",
        horizon=horizon,
        steps_lost=math.inf,
        steps_lost_frac=math.inf,
        lower_frac=math.inf,
        upper_frac=math.inf,
        margin=margin,
        margin_asked=margin,
        chaos_frac=0.0,
        power_frac=0.0,
        curve_falls=True,
        trend=Trend(growth_frac=math.inf, p_value=0.0, projected_frac=math.inf, grows=True),
    )


def _first_non_finite(losses: Sequence[float]) -> int | None:
    return next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)


def _check_finite(losses: Sequence[float], run: str) -> None:
    broken_at = _first_non_finite(losses)
    if broken_at is not None:
        raise WorkloadError(
            f"fidelity: the loss of the {run} is {losses[broken_at]} at step {broken_at + 1}: the workload is broken, "
            "not the precision; make it train in FP32 first (lower learning rate, clipped gradients, clean data)"
        )


def _check_lengths(reference: Sequence[float], other: Sequence[float], run: str) -> None:
    if len(reference) != len(other):
        raise MeasurementError(
            f"fidelity: the {run} has {len(other)} steps, the FP32 run {len(reference)}; paired curves have one length"
        )
    if len(reference) < MIN_HORIZON:
        raise MeasurementError(
            f"fidelity: {len(reference)} steps cannot be compared; train at least {MIN_HORIZON}, better hundreds"
        )
