"""What to do about gradients that a format loses: a scale, or FP32 where no scale helps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autoprec.analysis.loss_scale import GROWTH_INTERVAL, LossScaleAdvice

_NUM_SITES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleFinding:
    """A finding about the loss scale of one format; `site` is the worst one, empty for the whole run."""

    code: str
    severity: Literal["warning", "note"]
    site: str
    message: str
    fix: str


def loss_scale_findings(advice: LossScaleAdvice) -> Iterator[LossScaleFinding]:
    """Yield what the gradients of a format need, and what no scale can do for them."""
    if advice.forward_overflow:
        yield _forward(advice)
    if advice.needed:
        yield _underflow(advice)
    if advice.overflowing and not advice.per_tensor:
        first = advice.overflowing[0]
        yield LossScaleFinding(
            code="gradients_overflow", severity="warning", site=first if ":" in first else "",
            message=f"the gradient of {first} is beyond {advice.format}'s largest number without any loss scale",
            fix="make the loss smaller (a mean in place of a sum), or keep the site in FP32",
        )  # fmt: skip
    if advice.inner_max_abs is not None and not advice.per_tensor and advice.needed:
        yield LossScaleFinding(
            code="loss_scale_does_not_reach", severity="note", site="",
            message=f"the loss takes gradients itself, up to {advice.inner_max_abs:.2g}: they are made before the loss "
            f"is scaled, so that no scale keeps them in {advice.format}",
            fix="multiply what they are taken of by a constant and divide them by it in FP32, or keep both in FP32",
        )  # fmt: skip


def _forward(advice: LossScaleAdvice) -> LossScaleFinding:
    site, *others = advice.forward_overflow
    rest = f"; so do {len(others)} others" if others else ""
    return LossScaleFinding(
        code="forward_overflow", severity="warning", site=site,
        message=f"it exceeds {advice.format}'s largest number in the forward pass, before any gradient exists{rest}: "
        "no loss scale helps, a dynamic one halves itself until nothing is left and every step is skipped",
        fix=f'keep it in FP32: {{sites: "{site}", format: fp32}}',
    )  # fmt: skip


def _underflow(advice: LossScaleAdvice) -> LossScaleFinding:
    site, frac = advice.lost[0] if advice.lost else ("", 1.0)
    others = f"; so do {len(advice.lost) - 1} others" if len(advice.lost) > 1 else ""
    message = f"without a loss scale its gradient loses {frac:.0%} of its norm in {advice.format}{others}"
    settings = f"kind: dynamic, initial: {advice.initial:.0f}"
    if advice.growth_interval != GROWTH_INTERVAL:
        settings += f", growth_interval: {advice.growth_interval}"
    fix = f"loss_scale: {{{settings}}}"
    if not advice.fits:
        fix += (
            f"; it does not save all: some gradients need {power(advice.minimum)}, and with more than "
            f"{power(advice.maximum)} the largest overflows, so keep {_some(advice)} in FP32"
        )
    return LossScaleFinding(code="gradients_underflow", severity="warning", site=site, message=message, fix=fix)


def power(scale: float) -> str:
    """Return a scale, which is a power of two, as one: 2**8; 1 as 1."""
    exponent = round(scale).bit_length() - 1 if scale >= 1 else -(round(1 / scale).bit_length() - 1)
    return f"2**{exponent}" if exponent else "1"


def _some(advice: LossScaleAdvice) -> str:
    sites = [site for site, _ in advice.lost]
    rest = len(sites) - _NUM_SITES
    return ", ".join(sites[:_NUM_SITES]) + (f" and {rest} more" if rest > 0 else "")
