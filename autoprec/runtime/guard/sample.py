"""What is judged, and what a judgement says: values."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What was seen since the last sample, and at this step; the same numbers on every rank.

    `position` counts the steps of training: restoring goes back in it. `lowest_loss` is the least mean of a sample so
    far, `saved_scale` the loss scale of the checkpoint that was just loaded. `num_bad_losses` and `num_bad_steps` count
    losses, and steps, that were not finite and are not told of yet. `undone_parameter` is one whose
    update was just taken back, for `num_undone` elements of it that were not finite.
    """

    position: int
    loss_mean: float = math.nan
    num_losses: int = 0
    lowest_loss: float = math.inf
    num_bad_losses: int = 0
    num_bad_steps: int = 0
    skipped_frac: float = 0.0
    num_counted: int = 0
    skipped_in_row: int = 0
    is_scaled: bool = False
    loss_scale: float = 1.0
    minimum_scale: float = 0.0
    saved_scale: float | None = None
    growth_interval: int = 2000
    is_dynamic: bool = False
    flush_frac: float | None = None
    layer_flush_frac: float | None = None
    flush_layer: str = ""
    overflow_frac: float | None = None
    overflow_layer: str = ""
    frozen_frac: float = 0.0
    frozen_parameter: str = ""
    broken_parameter: str = ""
    undone_parameter: str = ""
    num_undone: int = 0
    odd_rank: int | None = None
    odd_what: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a detector has to say; `site` is the layer or parameter at fault, if it knows one."""

    detector: str
    message: str
    advice: str
    number: float
    threshold: float
    site: str = ""
