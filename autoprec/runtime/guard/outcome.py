"""What comes back from a guarded step."""

from dataclasses import dataclass

import torch

from autoprec.runtime.guard.events import GuardEvent
from autoprec.runtime.step import StepOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardOutcome:
    """What came of a guarded step: that of `precision.step`, and what the guard found.

    `restored_to` is the position that training went back to, None if it did not.
    """

    step: int
    outcome: StepOutcome
    events: tuple[GuardEvent, ...] = ()
    restored_to: int | None = None

    @property
    def stepped(self) -> bool:
        """Return whether the optimizers stepped."""
        return self.outcome.stepped

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Return the norm of the gradients before clipping; None if no `max_norm` was given."""
        return self.outcome.grad_norm

    @property
    def loss_scale(self) -> float:
        """Return the scale that the gradients of this step had; 1 without scaling."""
        return self.outcome.loss_scale

    @property
    def collapsed(self) -> bool:
        """Return whether the step overflowed at the smallest loss scale there is."""
        return self.outcome.collapsed
