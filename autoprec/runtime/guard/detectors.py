"""The detectors: one row each, a judgement of numbers that were sampled. No torch, and no state."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoprec.runtime.guard.calibration import Calibration
from autoprec.runtime.guard.events import Reaction
from autoprec.runtime.guard.limits import GuardLimits
from autoprec.runtime.guard.sample import Finding, Sample

Judge = Callable[[Sample, Calibration, GuardLimits], Finding | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    """A row: what it watches, what it needs of the calibration, its reactions in order, and how it judges.

    Detectors of one `ladder` climb it together: of several ranks one may see the loss, and all the gradients.
    `needs` names fields of `Calibration`; while one of them is None the detector rests.
    """

    name: str
    watches: str
    judge: Judge
    reactions: tuple[Reaction, ...]
    needs: tuple[str, ...] = ()
    ladder: str = ""

    @property
    def climbs(self) -> str:
        """Return the name of the ladder that it climbs."""
        return self.ladder or self.name


def _bad_loss(sample: Sample, _: Calibration, __: GuardLimits) -> Finding | None:
    if not sample.num_bad_losses:
        return None
    return Finding(
        detector="non_finite_loss",
        message=f"{sample.num_bad_losses} losses since the last sample were not finite",
        advice="look at the batches of these steps; give guard.step(loss, batch=batch) and guard(..., loss=...), and "
        "the site is named",
        number=sample.num_bad_losses,
        threshold=0,
    )


def _bad_gradient(sample: Sample, _: Calibration, __: GuardLimits) -> Finding | None:
    if sample.is_scaled or not sample.num_bad_steps:  # a loss scale that is sought skips steps: that is how
        return None
    return Finding(
        detector="non_finite_gradient",
        message=f"{sample.num_bad_steps} steps since the last sample had gradients that are not finite; skipped",
        advice="precision.find_overflow(batch, loss) names the site on such a batch",
        number=sample.num_bad_steps,
        threshold=0,
    )


def _broken_weights(sample: Sample, _: Calibration, __: GuardLimits) -> Finding | None:
    if not sample.broken_parameter:
        return None
    return Finding(
        detector="non_finite_weights",
        site=sample.broken_parameter,
        message="a parameter is not finite, and no step that the guard took made it so",
        advice="look at what else writes to parameters",
        number=math.nan,
        threshold=0,
    )


def _broken_update(sample: Sample, _: Calibration, __: GuardLimits) -> Finding | None:
    if not sample.undone_parameter:
        return None
    in_row = f", {sample.skipped_in_row} steps in a row" if sample.skipped_in_row > 1 else ""
    return Finding(
        detector="non_finite_update",
        site=sample.undone_parameter,
        message=f"the update of finite gradients is not finite{in_row}; the step was undone",
        advice="look at the optimizer: an eps that is 0 in its format, a root of a difference, weights near the end of "
        "their format",
        number=sample.num_undone,
        threshold=0,
    )


def _collapse(sample: Sample, calibration: Calibration, limits: GuardLimits) -> Finding | None:
    if not sample.is_scaled or not sample.skipped_in_row:
        return None
    settled = calibration.loss_scale
    is_long = sample.skipped_in_row >= limits.collapse_steps
    is_far = settled is not None and sample.loss_scale <= settled / 2**10 and sample.skipped_in_row >= limits.patience
    is_over = sample.loss_scale <= sample.minimum_scale and sample.skipped_in_row >= limits.patience
    if not (is_long or is_far or is_over):
        return None
    return Finding(
        detector="loss_scale_collapse",
        message=f"{sample.skipped_in_row} steps in a row were skipped, down to a loss scale of {sample.loss_scale:g}",
        advice="a site overflows whatever the scale: it must run in fp32",
        number=sample.loss_scale,
        threshold=settled / 2**10 if is_far and settled is not None else sample.minimum_scale,
    )


def _skipped(sample: Sample, calibration: Calibration, limits: GuardLimits) -> Finding | None:
    calibrated = calibration.skipped_frac or 0.0
    threshold = limits.skipped_frac + 2.0 * max(calibrated, 1.0 / sample.growth_interval)
    if sample.num_counted < limits.window // 2 or sample.skipped_frac <= threshold:
        return None
    return Finding(
        detector="skipped_steps",
        message=f"{100 * sample.skipped_frac:.3g}% of the last {sample.num_counted} steps were skipped",
        advice="batches are lost; a larger growth_interval, or fp32 at the site that overflows, mends it",
        number=sample.skipped_frac,
        threshold=threshold,
    )


def _flush(sample: Sample, calibration: Calibration, limits: GuardLimits) -> Finding | None:
    overall, layer = sample.flush_frac, sample.layer_flush_frac
    if overall is None or layer is None or calibration.flush_frac is None or calibration.layer_flush_frac is None:
        return None
    above = calibration.flush_frac + limits.flush_frac * (1 - calibration.flush_frac)
    layer_above = calibration.layer_flush_frac + 2 * limits.flush_frac * (1 - calibration.layer_flush_frac)
    is_layer = layer > layer_above and overall <= above
    if overall <= above and not is_layer:
        return None
    return Finding(
        detector="flush",
        site=sample.flush_layer,
        message="gradients fall below the smallest normal number of their format",
        advice="a larger loss scale (loss_scale.initial, or kind: dynamic), or fp32 or bf16 there",
        number=layer if is_layer else overall,
        threshold=layer_above if is_layer else above,
    )


def _overflow(sample: Sample, calibration: Calibration, limits: GuardLimits) -> Finding | None:
    if sample.overflow_frac is None or calibration.overflow_frac is None or sample.is_dynamic:
        return None  # a dynamic scale grows until it overflows, and skips that step
    threshold = calibration.overflow_frac + limits.overflow_frac
    if sample.overflow_frac <= threshold:
        return None
    return Finding(
        detector="overflow",
        site=sample.overflow_layer,
        message="gradients or weights come within a factor of 4 of the largest number of their format",
        advice="a smaller loss_scale.initial, kind: dynamic, or fp32 or bf16 there",
        number=sample.overflow_frac,
        threshold=threshold,
    )


def _frozen(sample: Sample, _: Calibration, limits: GuardLimits) -> Finding | None:
    if sample.frozen_frac < limits.frozen_frac:
        return None
    return Finding(
        detector="frozen_weights",
        site=sample.frozen_parameter,
        message="updates are below half an ulp of the stored weights and move them no more",
        advice="keep it in fp32 (parameters.keep), or use master: fp32 or rounding: stochastic",
        number=sample.frozen_frac,
        threshold=limits.frozen_frac,
    )


def _drift(sample: Sample, calibration: Calibration, limits: GuardLimits) -> Finding | None:
    band = calibration.losses
    if band is None or not sample.num_losses or not math.isfinite(sample.lowest_loss):
        return None
    width = limits.band * band.scatter / math.sqrt(sample.num_losses) + 0.1 * band.fall
    threshold = max(band.at(sample.position), sample.lowest_loss) + width
    if not sample.loss_mean > threshold:
        return None
    return Finding(
        detector="loss_drift",
        message=f"the loss rises: mean {sample.loss_mean:.4g} of {sample.num_losses} steps, {sample.lowest_loss:.4g} "
        f"at its lowest, {band.at(sample.position):.4g} recorded",
        advice="compare with a run under the fallback from the last checkpoint (autoprec audit does); then look at "
        "learning rate and data",
        number=sample.loss_mean,
        threshold=threshold,
    )


def _ranks(sample: Sample, _: Calibration, __: GuardLimits) -> Finding | None:
    if sample.odd_rank is None:
        return None
    return Finding(
        detector="ranks",
        message=f"rank {sample.odd_rank} disagrees with rank 0 on {sample.odd_what}",
        advice="start every rank from one policy file and one checkpoint; look for code that runs on one rank only",
        number=sample.odd_rank,
        threshold=0,
    )


def _checkpoint(sample: Sample, _: Calibration, __: GuardLimits) -> Finding | None:
    if sample.saved_scale is None or sample.loss_scale == sample.saved_scale:
        return None
    return Finding(
        detector="checkpoint",
        message=f"the loss scale was {sample.saved_scale:g} in the checkpoint and is {sample.loss_scale:g}",
        advice="load precision.state_dict() beside model, optimizer and guard",
        number=sample.loss_scale,
        threshold=sample.saved_scale,
    )


_ALL: tuple[Reaction, ...] = ("warn", "promote", "fallback", "restore", "stop")
DETECTORS: Mapping[str, Detector] = MappingProxyType(
    {
        row.name: row
        for row in (
            Detector(name="ranks", watches="policy, step and weights of all ranks are equal", judge=_ranks,
                     reactions=("restore", "stop")),
            Detector(name="non_finite_weights", watches="every parameter is finite", judge=_broken_weights,
                     reactions=("restore", "stop")),
            Detector(name="non_finite_loss", watches="the loss of every step is finite", judge=_bad_loss,
                     reactions=_ALL, ladder="non_finite"),
            Detector(name="non_finite_gradient", watches="without loss scaling every gradient is finite",
                     judge=_bad_gradient, reactions=_ALL, ladder="non_finite"),
            Detector(name="non_finite_update", watches="updates are finite where that is not proven",
                     judge=_broken_update, reactions=_ALL),
            Detector(name="loss_scale_collapse", watches="the loss scale finds a value at which steps are taken",
                     judge=_collapse, reactions=_ALL[1:]),
            Detector(name="skipped_steps", watches="the fraction of skipped steps", judge=_skipped, reactions=_ALL),
            Detector(name="flush", watches="gradients that fall below a narrow format", judge=_flush, reactions=_ALL,
                     needs=("flush_frac", "layer_flush_frac")),
            Detector(name="overflow", watches="gradients and weights near the end of a narrow format",
                     judge=_overflow, reactions=_ALL, needs=("overflow_frac",)),
            Detector(name="frozen_weights", watches="updates move weights that are stored low", judge=_frozen,
                     reactions=_ALL),
            Detector(name="loss_drift", watches="the loss stays in the recorded band, or goes on falling", judge=_drift,
                     reactions=_ALL, needs=("losses",)),
            Detector(name="checkpoint", watches="the loss scale is that of the checkpoint that was loaded",
                     judge=_checkpoint, reactions=("warn",)),
        )
    }
)  # fmt: skip


def findings(sample: Sample, calibration: Calibration, limits: GuardLimits) -> tuple[Finding, ...]:
    """Return what the detectors have to say, the gravest first."""
    found = (row.judge(sample, calibration, limits) for row in DETECTORS.values())
    return tuple(each for each in found if each is not None)


def resting(calibration: Calibration | None) -> tuple[tuple[str, str], ...]:
    """Return the detectors that rest, each with the fields that the calibration lacks."""
    known = calibration or Calibration()
    lacking = {row.name: [name for name in row.needs if getattr(known, name) is None] for row in DETECTORS.values()}
    return tuple((name, ", ".join(fields)) for name, fields in lacking.items() if fields)
