"""The last steps: their losses since the last sample, and which of a longer stretch were skipped."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from autoprec.runtime.step import StepOutcome


class Window:
    """Losses and outcomes as they come. What the device alone knows yet is held as tensors, and read by `settle`.

    `in_row` counts the steps skipped in a row up to now, as far as known. `losses` are those since the last sample.
    `num_untold` counts skipped steps that were found by `settle`, when their batches were gone.
    """

    def __init__(self, length: int) -> None:
        self.in_row = 0
        self.num_untold = 0
        self.losses: list[float] = []
        self._skipped: deque[bool] = deque(maxlen=length)
        self._unread: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = []  # the last: counted already

    def note(self, loss: torch.Tensor, outcome: StepOutcome) -> bool | None:
        """Note a step, and return whether it was taken; None where only the device knows yet."""
        on_host = loss.device.type == "cpu"
        found = outcome.found_inf
        if not on_host or not (outcome.is_known or found is None or found.device.type == "cpu"):
            self._unread.append((loss, found, outcome.is_known))
            if not outcome.is_known:
                return None
            return self._count(stepped=outcome.stepped)
        self.losses.append(float(loss))
        return self._count(stepped=outcome.stepped)

    def settle(self) -> None:
        """Read what is held as tensors, all at once, and count the steps whose outcome was not known when they came."""
        if not self._unread:
            return
        home = self._unread[0][0].device
        zero = torch.zeros((), device=home)
        flat = [each for loss, found, _ in self._unread for each in (loss.float().to(home), _on(found, home, zero))]
        numbers = torch.stack(flat).tolist()
        is_counted = [counted for _, _, counted in self._unread]
        self._unread.clear()
        self.losses += numbers[::2]
        for found, counted in zip(numbers[1::2], is_counted, strict=True):
            if not counted:
                self.num_untold += bool(found)
                self._count(stepped=not found)

    @property
    def skipped_frac(self) -> float:
        """Return the fraction of skipped steps."""
        return sum(self._skipped) / len(self._skipped) if self._skipped else 0.0

    @property
    def num_counted(self) -> int:
        """Return of how many steps `skipped_frac` is."""
        return len(self._skipped)

    @property
    def num_bad_losses(self) -> int:
        """Return how many losses since the last sample are not finite."""
        return sum(not math.isfinite(loss) for loss in self.losses)

    @property
    def loss_sum(self) -> float:
        """Return the sum of the finite losses since the last sample."""
        return sum(loss for loss in self.losses if math.isfinite(loss))

    def drop_last_loss(self) -> None:
        """Forget the loss of the last step: it was told of."""
        if self._unread:
            self._unread.pop()
        else:
            self.losses.pop()

    def begin(self) -> None:
        """Begin the stretch after a sample."""
        self.losses, self.num_untold = [], 0

    def clear(self) -> None:
        """Forget all: what comes now is another run."""
        self.begin()
        self.in_row = 0
        self._skipped.clear()
        self._unread.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and lists; everything must be settled."""
        return {
            "in_row": self.in_row,
            "num_untold": self.num_untold,
            "losses": list(self.losses),
            "skipped": list(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.clear()
        self.in_row, self.num_untold = state["in_row"], state["num_untold"]
        self.losses = list(state["losses"])
        self._skipped.extend(state["skipped"])

    def _count(self, *, stepped: bool) -> bool:
        self._skipped.append(not stepped)
        self.in_row = 0 if stepped else self.in_row + 1
        return stepped


def _on(found: torch.Tensor | None, home: torch.device, zero: torch.Tensor) -> torch.Tensor:
    return zero if found is None else found.to(home).float()
