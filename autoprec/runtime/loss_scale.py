"""Loss scaling on `torch.amp.GradScaler`, with the bounds a policy sets and an eye on the order of calls."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoprec.errors import ScalingError
from autoprec.policy import LossScale
from autoprec.runtime.scaled_gradients import ScaledGradients

_TWO_LINES = """
    precision.backward(loss)
    precision.step(optimizer, max_norm=1.0)  # unscales, clips, steps, updates the scale
"""


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer unscales and skips by itself, so that nobody waits to know whether it stepped."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


_watching: WeakSet["BoundedGradScaler"] = WeakSet()


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Have each scaler look at an optimizer that steps."""
    if not torch.compiler.is_compiling():
        for scaler in tuple(_watching):
            scaler.check_step_beside(optimizer)


@functools.cache
def _watch_steps() -> None:
    """Place the hook, once a process: it must not be taken out while torch goes through its hooks."""
    register_optimizer_step_pre_hook(_look)


class BoundedGradScaler(torch.amp.GradScaler):
    """A `GradScaler` whose scale stays within [`minimum`, `maximum`], and which refuses gradients it cannot unscale.

    A static scale is one whose bounds are equal: steps that are not finite are skipped, the scale stays.
    `parameters()` returns those whose gradients are watched; without it the order of calls is not checked.

    Raises: `ScalingError`, in `unscale_` and `step`, if the gradients were changed while they were multiplied by the
    scale, added to those of an earlier step, or if no loss was scaled since the last update.
    """

    def __init__(
        self, device: str, loss_scale: LossScale, parameters: Callable[[], Iterable[torch.Tensor]] | None = None
    ) -> None:
        static = loss_scale.kind == "static"
        super().__init__(
            device,
            init_scale=loss_scale.initial,
            growth_factor=1.0 + 1e-12 if static else loss_scale.growth_factor,  # torch wants it above 1: fp32's is 1
            backoff_factor=1.0 - 1e-12 if static else loss_scale.backoff_factor,
            growth_interval=loss_scale.growth_interval,
            enabled=loss_scale.kind != "none",
        )
        bounds = (loss_scale.initial, loss_scale.initial) if static else (loss_scale.minimum, loss_scale.maximum)
        self._minimum, self._maximum = bounds
        self._gradients = None if parameters is None or not self._enabled else ScaledGradients(parameters)
        self._steps = self._was_used = False
        self._counted: torch.Tensor | None = None
        if self._gradients is not None:
            _watch_steps()
            _watching.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gradients": None, "_counted": None}

    @property
    def minimum(self) -> float:
        """Return the smallest scale: an overflow there is one that no backing off mends."""
        return self._minimum

    def scale(self, outputs: Any) -> Any:
        """Return `outputs` (a tensor, or tensors in containers) times the scale, as `GradScaler.scale` does."""
        scaled: Any = super().scale(outputs)
        self._was_used = True
        if self._gradients is not None:
            for each in (scaled,) if isinstance(scaled, torch.Tensor) else torch.utils._pytree.tree_leaves(scaled):
                self._gradients.watch(each)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, as `GradScaler.unscale_` does, once before a step."""
        self._check_order("unscale_", optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients are not finite, as `GradScaler.step` does."""
        if is_fused(optimizer):  # for others torch calls unscale_ above
            self._check_order("step", optimizer)
        self._steps = True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            self._steps = False
        if self._gradients is not None:
            self._gradients.note_stepped(optimizer)
        return result

    @contextmanager
    def counting(self, found: torch.Tensor | None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Iterator[None]:
        """Have the steps of `optimizers` in this block skip too where `found` is 1, whatever their gradients are."""
        self._counted = found if self._enabled else None
        try:
            for optimizer in optimizers:
                if self.is_unscaled(optimizer):  # looked at already
                    self._count(self._found_inf_per_device(optimizer))
            yield
        finally:
            self._counted = None

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(*args, **kwargs)
        self._count(found)
        return found

    def _count(self, found: Mapping[Any, torch.Tensor]) -> None:
        if self._counted is not None:
            for device, each in found.items():
                each.copy_(torch.maximum(each, self._counted.to(device, non_blocking=True)))

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale after a step, as `GradScaler.update` does, and keep it within the bounds."""
        super().update(new_scale)
        if self._gradients is not None:
            self._gradients.is_scaled = False
        self._stay_within_bounds()

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `unscale_` was called for the optimizer since the last update."""
        return self._stage(optimizer) is OptState.UNSCALED

    def found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return a tensor above 0 if the optimizer's gradients are not all finite; None before they are looked at."""
        found = list(self._found_inf_per_device(optimizer).values()) if self._enabled else []
        total: torch.Tensor | None = None
        for each in found:
            total = each.clone() if total is None else total + each.to(total.device, non_blocking=True)
        return total

    def scale_now(self) -> torch.Tensor | None:
        """Return a copy of the scale as a tensor, which waits for no device; None if scaling is off or not begun."""
        return self._scale.clone() if self._enabled and self._scale is not None else None

    def check_step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at a step past this scaler: warn, once, if no loss was ever scaled.

        Raises: `ScalingError` if the gradients are still scaled.
        """
        if self._steps or self._gradients is None or self.is_unscaled(optimizer):
            return
        if not self._was_used:
            self._warn_unused(optimizer)
        if self._gradients.is_scaled and self._gradients.holds(optimizer):
            raise ScalingError(
                f"{type(optimizer).__name__}.step: its gradients are still multiplied by the loss scale; "
                f"write{_TWO_LINES}or call precision.scaler.step(optimizer) and precision.scaler.update()"
            )

    def retire(self) -> None:
        """Expect no loss any more: the policy that asks for this scale runs no longer."""
        self._was_used = True

    def _warn_unused(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of training without the loss scale that the policy asks for."""
        assert self._gradients is not None
        rates = (float(group.get("lr", 1.0)) for group in optimizer.param_groups)
        if not self._gradients.are_of(optimizer) or not any(rates):
            return  # at a rate of 0 torch's distributed checkpoints have an optimizer make its state
        self._was_used = True
        warnings.warn(
            f"{type(optimizer).__name__}.step: the policy scales the loss, and this one was not scaled, so that "
            f"gradients too small for fp16 become zero; write{_TWO_LINES}or give precision.scaler to what runs the "
            "loop, or put loss_scale: none into the policy (said once)",
            RuntimeWarning,
            stacklevel=5,
        )

    def accept_gradients(self) -> None:
        """Take gradients that were changed while scaled for good: an average of them, say, or an all-reduce by hand."""
        if self._gradients is not None:
            self._gradients.note()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the scale of a checkpoint, within the bounds of this policy."""
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._init_scale = min(max(self._init_scale, self._minimum), self._maximum)
        self._stay_within_bounds()

    def _stay_within_bounds(self) -> None:
        if self._enabled and self._scale is not None:
            self._scale.clamp_(self._minimum, self._maximum)

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        states = self._per_optimizer_states if self._enabled else {}
        stage: OptState = states[id(optimizer)]["stage"] if id(optimizer) in states else OptState.READY
        return stage

    def _check_order(self, what: str, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients that are no sums of gradients times the present scale, unless they are unscaled already."""
        gradients = self._gradients
        if gradients is None or self._stage(optimizer) is not OptState.READY:
            return
        if not gradients.is_scaled:
            raise ScalingError(
                f"scaler.{what}: no loss was scaled since the last update of the scale. Either loss.backward() was "
                f"called without it; write{_TWO_LINES}or another step came in between: optimizers that share a "
                "backward pass step together, precision.step(one, other)"
            )
        if gradients.mixed(optimizer):
            raise ScalingError(
                f"scaler.{what}: gradients times the loss scale were added to those that the last step left behind, "
                "which are divided by it; call optimizer.zero_grad() after each step"
            )
        if gradients.changed(optimizer):
            raise ScalingError(
                f"scaler.{what}: gradients were changed after the backward pass while still multiplied by the loss "
                f"scale, so that clip_grad_norm_ clips at max_norm / scale; write{_TWO_LINES}or call "
                "precision.scaler.unscale_(optimizer) before anything that touches gradients. A change that is linear "
                "in them (an average, an all-reduce) may stand: call precision.scaler.accept_gradients() after it"
            )
