"""Whether a format breaks a step: everything low against FP32, beside what rounding the weights alone does.

A gradient that differs from FP32's is no fault by itself. Rounding moves every gradient, and a chaotic one (a fresh
batch norm over few samples) a lot: there FP32 itself, nudged by as little, differs as much. So a step is broken if its
error is beyond what healthy steps show, and a multiple of what rounding only the weights to the format does to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import Damage, Reference, damage, gradients_of, relative_error
from autoprec.capture import Replay
from autoprec.graph.site import Site
from autoprec.numerics import format_named

# Errors of healthy steps are some ten unit roundoffs, those of broken ones are near 1. In roots of the unit roundoff,
# their geometric middle, the healthy ones of the given cases end at 1.9 and the broken ones begin at 3.
_BROKEN = 2.2
_REPAIRED = 2.75
# What separates a fault from chaos: healthy steps were seen at up to 2 times the error of rounded weights.
_FLOORS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatCheck:
    """What a step does with everything low: `damage` of the worst batch, whose index is `batch`.

    `floor` is the gradient error that rounding the weights alone makes.
    """

    format: str
    damage: Damage
    batch: int
    floor: float

    @property
    def limit(self) -> float:
        """Return the relative gradient error beyond which the step is taken for broken."""
        return max(healthy_error(self.format), _FLOORS * self.floor)

    @property
    def is_broken(self) -> bool:
        """Return whether the format breaks the step."""
        return self.damage.gradient_error > self.limit

    @property
    def repaired(self) -> float:
        """Return the error that a repair has to reach: one that a healthy step may show, and half of what it was."""
        healthy = max(_REPAIRED * math.sqrt(format_named(self.format).unit_roundoff), _FLOORS * self.floor)
        return min(healthy, self.damage.gradient_error / 2)


def healthy_error(fmt: str) -> float:
    """Return the relative gradient error that a healthy step in a format may show, where nothing is chaotic."""
    return _BROKEN * math.sqrt(format_named(fmt).unit_roundoff)


def check_format(
    references: Sequence[Reference], fmt: LowFormat, sites: Sequence[Site], loss_scale: float, least_scale: float
) -> FormatCheck:
    """Return what running all `sites` in the format does under a loss scale that may back off to `least_scale`.

    Costs one step a batch, and one more for the floor.
    """
    found = [damage(each, fmt, frozenset(sites), loss_scale=loss_scale, least_scale=least_scale) for each in references]
    batch = max(range(len(found)), key=lambda index: found[index].gradient_error)
    return FormatCheck(
        format=fmt.name,
        damage=found[batch],
        batch=batch,
        floor=floor_of(references[batch], fmt),
    )


def floor_of(reference: Reference, fmt: LowFormat) -> float:
    """Return the gradient error of an FP32 step whose weights are rounded to the format; 0 if that breaks the step."""
    loss = _RoundedWeights(reference.recording, fmt.dtype).loss()
    if not loss.isfinite():
        return 0.0
    error = relative_error(gradients_of(loss, reference.recording), reference.gradients)
    return error if math.isfinite(error) else 0.0


class _RoundedWeights(Replay):
    """Runs a recorded step in FP32 with its weights rounded; the gradient reaches the weights."""

    def __init__(self, recording: Any, dtype: torch.dtype) -> None:
        super().__init__(recording)
        self._dtype = dtype

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, nn.Parameter) or value.dtype != torch.float32:
            return value
        with torch.no_grad():
            error = value.to(self._dtype).to(value.dtype) - value
        with torch.enable_grad():  # a step may read a weight under no_grad first
            return value + error
