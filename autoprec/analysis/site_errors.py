"""The error that each site adds to a step if it runs low: measured one by one as far as steps allow, else estimated.

The error of a site is the square of the relative gradient error of a step with only it low; squares of independent
errors add up, so the error of an assignment is their sum. Sites of equal layers that run on one line are measured
together and share what is found. Where there are more of them than steps, those with the largest first-order effect on
the loss are measured, and the others are scaled from them.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import Reference, damage
from autoprec.analysis.repair import Unit, units_of
from autoprec.analysis.sensitivity import Sensitivity, sensitivities
from autoprec.graph.site import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteErrors:
    """The error of each site in one format, infinite where it breaks the step.

    `num_measured` of `num_units` groups were measured. `rank_correlation` is Spearman's, of the measured errors with
    the first-order estimates; NaN where fewer than three can be compared.
    """

    format: str
    errors: Mapping[Site, float]
    num_units: int
    num_measured: int
    rank_correlation: float


def site_errors(
    reference: Reference,
    fmt: LowFormat,
    sites: Sequence[Site],
    *,
    loss_scale: float = 1.0,
    max_steps: int = 64,
    max_s: float = math.inf,
) -> SiteErrors:
    """Return the error of each of `sites`. Costs one step and a half, and up to `max_steps` more in up to `max_s`."""
    started = time.monotonic()
    estimated = sensitivities(reference, fmt, sites)
    units = units_of([reference.recording.op_graph], sites)
    ranked = sorted(units, key=lambda unit: -_estimate(unit, estimated))
    measured: dict[Unit, float] = {}
    for unit in ranked[:max_steps]:
        if measured and time.monotonic() - started > max_s:
            break
        measured[unit] = _alone(reference, fmt, unit, loss_scale)
    scale = _scale(measured, estimated)
    errors: dict[Site, float] = {}
    for unit in units:
        error = measured[unit] if unit in measured else _estimate(unit, estimated) * scale
        errors.update(dict.fromkeys(unit, error / len(unit)))
    return SiteErrors(
        format=fmt.name,
        errors={site: errors[site] for site in sites if site in errors},
        num_units=len(units),
        num_measured=len(measured),
        rank_correlation=_correlation(measured, estimated),
    )


def _alone(reference: Reference, fmt: LowFormat, unit: Unit, loss_scale: float) -> float:
    low = frozenset(unit)
    return damage(reference, fmt, low, forced=low, loss_scale=loss_scale).gradient_error ** 2


def _estimate(unit: Unit, estimated: Mapping[Site, Sensitivity]) -> float:
    return sum(estimated[site].error for site in unit if site in estimated)


def _scale(measured: Mapping[Unit, float], estimated: Mapping[Site, Sensitivity]) -> float:
    """Return what turns a first-order effect on the loss into an error: the median ratio of those that are known."""
    pairs = [(error, _estimate(unit, estimated)) for unit, error in measured.items()]
    ratios = [error / effect for error, effect in pairs if 0 < effect < math.inf and 0 < error < math.inf]
    return statistics.median(ratios) if ratios else 1.0


def _correlation(measured: Mapping[Unit, float], estimated: Mapping[Site, Sensitivity]) -> float:
    pairs = [(error, _estimate(unit, estimated)) for unit, error in measured.items()]
    finite = [(error, effect) for error, effect in pairs if math.isfinite(error) and math.isfinite(effect)]
    if len({error for error, _ in finite}) < 3 or len({effect for _, effect in finite}) < 3:
        return math.nan
    errors, effects = zip(*finite, strict=True)
    return statistics.correlation(_ranks(errors), _ranks(effects))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value among them; equal ones share their mean place.

    By hand, as loading `scipy.stats` takes 0.7 s.
    """
    ordered = sorted(values)
    first, count = {value: ordered.index(value) for value in set(values)}, Counter(values)
    return [first[value] + (count[value] - 1) / 2 for value in values]
