"""Gradients of micro-batches that are summed in a low format: how much of the later ones arrives."""

from collections.abc import Iterator, Sequence

import torch

from autoprec.analysis.short_run import ParameterRun, ShortRun
from autoprec.analysis.stored_values import (
    StoredFault,
    StoredVerdict,
    frac,
    is_scaled,
    percent,
    power_of_two_below,
    relative_error,
    stored,
)
from autoprec.numerics import FORMATS, format_named

# A sum that misses more than this fraction of what was added to the first micro-batch is not the gradient.
LOST_FRAC = 0.1


def gradient_faults(run: ShortRun, formats: Sequence[str]) -> Iterator[StoredFault]:
    """Yield what summing the gradients of micro-batches in each format does, parameter by parameter.

    Gradients are rounded before they are added; what is counted is what the sum makes of them. They carry the largest
    loss scale that their format allows, so that the small ones are there to be summed.
    """
    for name in formats:
        scale = _scale(run, name)
        for each in run.parameters:
            yield _fault(each, name, scale)


def _fault(run: ParameterRun, format_name: str, scale: float) -> StoredFault:
    parts = [stored(each * scale, format_name) for each in run.micro_gradients]
    total, swamped, added = parts[0], [], []
    for part in parts[1:]:
        new = stored(total + part, format_name)
        swamped.append(new == total)
        added.append(part != 0)
        total = new
    wanted = torch.stack(parts).sum(0)
    rest = wanted - parts[0]
    numbers = {
        "swamped_frac": frac(torch.stack(swamped), torch.stack(added)) if swamped else 0.0,
        "error": relative_error(total, wanted),
        "error_of_later_ones": relative_error(total, wanted, rest),
        "num_micro_batches": float(len(parts)),
    }
    lost = numbers["error_of_later_ones"]
    is_lost = lost > LOST_FRAC and numbers["swamped_frac"] > LOST_FRAC
    verdict: StoredVerdict = "needs_fp32" if is_lost else "fine"
    reason = (
        f"{percent(numbers['swamped_frac'])} of what micro-batches after the first add changes nothing, and their sum "
        f"is {percent(lost)} off"
    )
    return StoredFault(
        part="gradients", name=run.name, format=format_name, verdict=verdict, reason=reason, numbers=numbers
    )


def _scale(run: ShortRun, format_name: str) -> float:
    """Return the largest loss scale that keeps the sums of magnitudes in range; 1 where the range is FP32's."""
    fmt = format_named(format_name)
    if is_scaled(fmt) or fmt.max_exponent == FORMATS["fp32"].max_exponent:
        return 1.0
    sums = [
        float(torch.stack(each.micro_gradients).abs().sum(0).max()) for each in run.parameters if each.values[0].numel()
    ]
    return power_of_two_below(fmt.max, max(sums, default=0.0))
