"""What a guarded loop says that no detector does: steps skipped at once, what is watched, and what a board draws."""

import math

from autoprec.runtime.guard.sample import Finding, Sample

WATCHING = (
    "each step keeps a copy of weights and optimizer state, and looks at the weights after it; see docs/guard.md (said "
    "once)"
)


def non_finite_step(number: float, in_row: int, patience: int, *, is_loss: bool, at_hand: bool) -> Finding:
    """Return the finding of a step skipped for its loss or gradients; `at_hand` says whether its batch is there."""
    what = "the loss is" if is_loss else "gradients are"
    to_do = (
        "if this batch is sound, keep the site that overflows on it in fp32"
        if at_hand
        else "look at this batch; guard.step(loss, batch=batch) with guard(..., loss=...) has the site named"
    )
    return Finding(
        detector="non_finite_loss" if is_loss else "non_finite_gradient",
        message=f"{what} not finite, {in_row} steps in a row" if in_row > 1 else f"{what} not finite",
        advice=to_do,
        number=number if is_loss else in_row,
        threshold=patience,
    )


def drawn(sample: Sample) -> tuple[tuple[str, float], ...]:
    """Return what a board is to draw of a sample."""
    numbers = (
        ("loss", sample.loss_mean),
        ("loss_scale", sample.loss_scale),
        ("skipped_frac", sample.skipped_frac),
        ("flush_frac", sample.flush_frac),
        ("overflow_frac", sample.overflow_frac),
        ("frozen_frac", sample.frozen_frac),
    )
    return tuple((name, number) for name, number in numbers if number is not None and math.isfinite(number))
