"""Verdicts of benchmarks/fidelity.py: what a candidate truly loses, and what autoprec says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from fidelity_cases import CANDIDATES, CHAOS, Candidate

from autoprec.measure import Fidelity, compare, hopeless
from autoprec.measure.series import t_quantile
from autoprec.measure.steps_lost import Pair, pair, trend

Curves: TypeAlias = dict[str, npt.NDArray[np.float64]]
Truth: TypeAlias = Literal["good", "bad", "bad later", "unclear"]
MARGIN = 0.01
HORIZONS = (30, 60, 120)
STEPS = 2 * HORIZONS[-1]  # the longest proof, and the long run that tells good from bad
LOOK_EVERY = 8
EARLY_CONFIDENCE = 0.999


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One candidate on one seed and horizon; `lost` is the fraction of steps it loses over all seeds.

    `truth` is by the horizon of the search and the long run, `proof_truth` and `proof_lost` by that of the proof.
    """

    case: str
    candidate: str
    is_fault: bool
    seed: int
    horizon: int
    truth: Truth
    lost: float
    proof_truth: Truth
    proof_lost: float
    search: str
    proof: str
    widened: bool
    cut_short: bool
    power: float
    early_at: int | None

    @property
    def proven(self) -> str:
        """Return the verdict after both stages: what the search could not judge may still be proven."""
        return self.search if self.search == "unfaithful" else self.proof


def truly_lost(reference: npt.NDArray[np.float64], candidate: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the fraction of steps that a candidate loses over all seeds, and its one-sided 95 % bounds (Fieller).

    Numerator and denominator are means over independent seeds; nothing is assumed on the noise within a curve.
    """
    pairs = [pair(ours, theirs, MARGIN) for ours, theirs in zip(reference.tolist(), candidate.tolist(), strict=True)]
    loss = np.array([both.difference.level for both in pairs])
    worth = np.array([both.slope * both.horizon for both in pairs])
    count, t = len(pairs), t_quantile(0.95, len(pairs) - 1)
    covariance = np.cov(loss, worth) / count
    a = worth.mean() ** 2 - t**2 * covariance[1, 1]
    b = loss.mean() * worth.mean() - t**2 * covariance[0, 1]
    c = loss.mean() ** 2 - t**2 * covariance[0, 0]
    ratio = loss.mean() / worth.mean()
    if a <= 0:  # the curve does not fall: nothing can be said
        return ratio, -np.inf, np.inf
    reach = np.sqrt(max(b * b - a * c, 0.0))
    return ratio, (b - reach) / a, (b + reach) / a


def truth_at(at_horizon: tuple[float, float, float], later: tuple[float, float, float]) -> Truth:
    """Return what a candidate is by its losses at the horizon and at the end of the long run."""
    if at_horizon[1] > MARGIN:
        return "bad"
    if later[1] > MARGIN:
        return "bad later"
    return "good" if max(at_horizon[2], later[2]) < MARGIN else "unclear"


def judge(
    reference: Sequence[float], candidate: Sequence[float], chaos: Sequence[float] | None
) -> tuple[Fidelity, bool]:
    """Return the fidelity of a trial as the search measures it, and whether it was hopeless before its end."""
    horizon = len(reference)
    for length in (*range(LOOK_EVERY, horizon, LOOK_EVERY), horizon):
        if hopeless(reference[:length], candidate[:length], MARGIN, horizon=horizon):
            seen = slice(0, max(length, 8))
            return compare(reference[seen], candidate[seen], margin=MARGIN), True
    return compare(reference, candidate, margin=MARGIN, chaos=chaos), False


def accepts_early(both: Pair, horizon: int) -> bool:
    """Return whether a trial could end as faithful by a bound of 99.9 % on where its difference leads.

    The line through the difference, prolonged to two horizons, must surely stay below the margin there.
    """
    line = both.difference
    reach = 2 * horizon - line.center
    allowed = MARGIN * horizon * max(both.slope, both.visible)
    error = np.hypot(np.hypot(line.level_se, reach * line.slope_se), MARGIN * horizon * both.slope_se)
    t = t_quantile(EARLY_CONFIDENCE, line.dof)
    return both.falls and not trend(both).grows and line.level + max(line.slope, 0) * reach + t * error < allowed


def early_look(reference: Sequence[float], candidate: Sequence[float]) -> int | None:
    """Return the step at which a trial would have been accepted before its end."""
    horizon = len(reference)
    looks = range(2 * LOOK_EVERY, horizon, LOOK_EVERY)
    return next((n for n in looks if accepts_early(pair(reference[:n], candidate[:n], MARGIN), horizon)), None)


def without_effect(found: Curves) -> list[str]:
    """Return the candidates that trained bit for bit as FP32 did: the fault is none on this workload."""
    return [how.name for how in CANDIDATES if np.array_equal(found[how.name], found["fp32"])]


def judged(case: str, found: Curves) -> list[Judged]:
    """Return the verdicts on all candidates of a workload, by seed and horizon; those that are FP32 are left out."""
    return [
        row
        for how, horizon in product(CANDIDATES, HORIZONS)
        if how.name not in without_effect(found)
        for row in _judged_at(case, found, how, horizon)
    ]


def _judged_at(case: str, found: Curves, how: Candidate, horizon: int) -> list[Judged]:
    reference, chaos, ours, longer = found["fp32"], found[CHAOS.name], found[how.name], 2 * horizon
    in_the_end = truly_lost(reference, ours)
    lost = truly_lost(reference[:, :horizon], ours[:, :horizon])
    proof_lost = truly_lost(reference[:, :longer], ours[:, :longer])
    fp32, trained, moved = reference.tolist(), ours.tolist(), chaos.tolist()
    rows = []
    for seed in range(len(ours)):
        search, short = judge(fp32[seed][:horizon], trained[seed][:horizon], moved[seed][:horizon])
        other = (seed + 1) % len(ours)
        widened = search.margin > search.margin_asked
        proof, _ = judge(fp32[other][:longer], trained[other][:longer], moved[other][:longer] if widened else None)
        rows.append(
            Judged(
                case=case,
                candidate=how.name,
                is_fault=how.is_fault,
                seed=seed,
                horizon=horizon,
                truth=truth_at(lost, in_the_end),
                lost=float(lost[0]),
                proof_truth=truth_at(proof_lost, in_the_end),
                proof_lost=float(proof_lost[0]),
                search="unfaithful" if short else search.verdict,
                proof=proof.verdict,
                widened=widened,
                cut_short=short,
                power=search.power_frac,
                early_at=early_look(fp32[seed][:horizon], trained[seed][:horizon]),
            )
        )
    return rows
