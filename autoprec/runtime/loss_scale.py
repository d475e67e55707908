"""Loss scaling on `torch.amp.GradScaler`, with the bounds a policy sets."""

from typing import Any

import torch

from autoprec.policy import LossScale


class BoundedGradScaler(torch.amp.GradScaler):
    """A `GradScaler` whose scale stays within [`minimum`, `maximum`]."""

    def __init__(self, device: str, loss_scale: LossScale) -> None:
        static = loss_scale.kind == "static"
        super().__init__(
            device,
            init_scale=loss_scale.initial,
            growth_factor=1.0 + 1e-12 if static else loss_scale.growth_factor,
            backoff_factor=1.0 - 1e-12 if static else loss_scale.backoff_factor,
            growth_interval=loss_scale.growth_interval,
            enabled=loss_scale.kind != "none",
        )
        bounds = (loss_scale.initial, loss_scale.initial) if static else (loss_scale.minimum, loss_scale.maximum)
        self._minimum, self._maximum = bounds

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale after a step, as `GradScaler.update` does, and keep it within the bounds."""
        super().update(new_scale)
        self._stay_within_bounds()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the scale of a checkpoint, within the bounds of this policy."""
        super().load_state_dict(state_dict)
        self._init_scale = min(max(self._init_scale, self._minimum), self._maximum)
        self._stay_within_bounds()

    def _stay_within_bounds(self) -> None:
        if self._enabled and self._scale is not None:
            self._scale.clamp_(self._minimum, self._maximum)
