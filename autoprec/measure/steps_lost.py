"""Steps lost: a difference of loss, counted in training steps of the FP32 run, and the errors of that count.

Both curves come from the same seed and the same batches, so the difference d of each step is free of most batch noise.
Over the last half of the horizon T, with D the mean of d:

- The FP32 curve falls there like -b log(step), fitted by least squares. Over the half that both D and b are taken from,
  the slope S = b mean(1/step) is within 3 % of the true mean slope for curves exp(-4t/T), 1/sqrt(t), 1/t, a straight
  line and a quarter cosine; fitted from a third to the end it would be up to 28 % off.
- Steps lost: k = D / S, to first order: on a log curve it comes out about 0.7 k^2 / T too large. Its bounds are
  Fieller's, so they contain the error of the slope. D and S have independent errors (see `series`), so k0 steps are
  rejected where |D - k0 S| > t sqrt(var D + k0^2 var S).
- On a flat or rising curve steps lost are undefined, yet two runs that both converged are not unfaithful. So steps are
  counted at the smallest slope that the batch noise lets one see, one standard error of S (and at least one FP32
  ulp of the largest loss per margin): a difference that loses no more than the margin at that slope is invisible.
- Growth: the line through d is prolonged to two horizons. Relative to b it is the fraction of steps lost there. A lead
  of k steps is d = -k S, which rises to zero as the curve flattens: a line through it would cross zero and end in a
  loss. So d that is below zero and whose line is still below zero at the horizon does not grow, whatever its slope.

Source: Fieller 1954, Some Problems in Interval Estimation, JRSS B 16(2), 175-185.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.measure.series import Line, fit_line, t_quantile, t_tail

CONFIDENCE = 0.95
_POWER = 0.80
_GROWTH_SIGNIFICANCE = 0.01  # a sound candidate must not be refused once in twenty for a chance slope
_ULP = 2.0**-23


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """Whether the difference grows: `growth_frac` is the fraction of steps lost that one more horizon adds.

    `p_value` is one-sided; `projected_frac` is the fraction of steps lost after two horizons if growth stays linear.
    A lead that shrinks does not grow.
    """

    growth_frac: float
    p_value: float
    projected_frac: float
    grows: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A paired difference of losses and the descent of FP32 over the last half of a run.

    `slope` is what FP32 gains a step, `visible` the smallest slope that counts as one. `falls` says whether `slope` is
    above its noise. `log_step` is the number of steps at which one log step passes: slope * log_step is b.
    """

    difference: Line
    slope: float
    slope_se: float
    visible: float
    falls: bool
    log_step: float
    horizon: int
    rounding: float

    @property
    def worth(self) -> float:
        """Return the loss that a step is counted as."""
        return max(self.slope, self.visible) if self.falls else self.visible

    @property
    def steps(self) -> float:
        """Return the steps lost."""
        return _ratio(self.difference.level, self.worth)


def pair(reference: Sequence[float], candidate: Sequence[float], margin: float) -> Pair:
    """Return difference and descent of two finite curves of equal length; `margin` only sets the smallest slope."""
    horizon = len(reference)
    tail = range(horizon // 2 + 1, horizon + 1)
    curve = fit_line([reference[step - 1] for step in tail], [math.log(step) for step in tail])
    log_step = len(tail) / sum(1 / step for step in tail)
    slope, slope_se = -curve.slope / log_step, curve.slope_se / log_step
    ulp = _ULP * max(abs(loss) for loss in reference)
    return Pair(
        difference=fit_line([candidate[step - 1] - reference[step - 1] for step in tail], list(tail)),
        slope=slope,
        slope_se=slope_se,
        visible=max(slope_se, ulp / (margin * horizon)),
        falls=slope > t_quantile(CONFIDENCE, curve.dof) * slope_se,
        log_step=log_step,
        horizon=horizon,
        rounding=_ULP * max(abs(reference[step - 1]) for step in tail) / math.sqrt(12 * len(tail)),
    )


def bounds(both: Pair) -> tuple[float, float]:
    """Return one-sided 95 % bounds of the steps lost, lower and upper.

    On a curve that does not visibly fall the lower one allows for the steepest slope its noise may hide.
    """
    difference = both.difference
    t = t_quantile(CONFIDENCE, difference.dof)
    if not both.falls:
        reach = t * difference.level_se
        least = difference.level - reach
        steepest = max(both.slope, 0.0) + t * both.slope_se if least > 0 else both.visible
        return _ratio(least, max(steepest, both.visible)), _ratio(difference.level + reach, both.visible)
    certain = both.worth**2 - t**2 * both.slope_se**2
    variance = difference.level_se**2 * certain + both.slope_se**2 * difference.level**2
    reach = t * math.sqrt(max(variance, 0.0))
    return (difference.level * both.worth - reach) / certain, (difference.level * both.worth + reach) / certain


def loses_more_than(steps: float, both: Pair, confidence: float = CONFIDENCE) -> bool:
    """Return whether a loss of `steps` or fewer is rejected."""
    error = math.hypot(both.difference.level_se, steps * both.slope_se)
    excess = both.difference.level - steps * max(both.slope, both.visible)
    return excess > t_quantile(confidence, both.difference.dof) * error


def loses_less_than(steps: float, both: Pair) -> bool:
    """Return whether a loss of `steps` or more is rejected, or the difference is too small to be seen."""
    t = t_quantile(CONFIDENCE, both.difference.dof)
    if both.difference.level + t * both.difference.level_se <= steps * both.visible:
        return True
    error = math.hypot(both.difference.level_se, steps * both.slope_se)
    return both.difference.level - steps * max(both.slope, 0.0) < -t * error


def outgrows(frac: float, both: Pair) -> bool:
    """Return whether the prolonged difference loses more than `frac` of two horizons, with 95 % confidence."""
    line = both.difference
    reach = 2 * both.horizon - line.center
    excess = line.level + line.slope * reach - frac * max(both.slope, both.visible) * both.log_step
    error = math.hypot(line.level_se, reach * line.slope_se, frac * both.slope_se * both.log_step)
    return excess > t_quantile(CONFIDENCE, line.dof) * error


def trend(both: Pair) -> Trend:
    """Return whether, and how fast, the difference grows."""
    line = both.difference
    p_value = 0.0 if line.slope > 0 else 1.0  # for a line without noise
    if line.slope_se > 0:
        p_value = t_tail(line.slope / line.slope_se, line.dof)
    worth = both.worth * both.log_step
    return Trend(
        growth_frac=_ratio(line.slope * both.horizon, worth),
        p_value=p_value,
        projected_frac=_ratio(line.level + line.slope * (2 * both.horizon - line.center), worth),
        grows=p_value < _GROWTH_SIGNIFICANCE and line.level + line.slope * (both.horizon - line.center) > 0,
    )


def power(both: Pair) -> float:
    """Return the number of lost steps that would have been told from none in 80 % of cases.

    Identical curves still hide what FP32 rounds away: half an ulp of the loss, uniformly distributed.
    Source: Bloom 1995, Minimum Detectable Effects, Evaluation Review 19(5), 547-556.
    """
    t = t_quantile(CONFIDENCE, both.difference.dof)
    smallest = (t + t_quantile(_POWER, both.difference.dof)) * max(both.difference.level_se, both.rounding)
    slope = both.worth - t * both.slope_se if both.falls else both.visible
    return _ratio(smallest, max(slope, both.visible))


def _ratio(loss: float, worth: float) -> float:
    """Return `loss` over `worth`; 0 for no loss, infinite where a step is worth nothing."""
    if loss == 0:
        return 0.0
    return loss / worth if worth > 0 else math.copysign(math.inf, loss)
