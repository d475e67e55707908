"""One optimizer step under a loss scale: unscale, clip, step, update, and the scheduler, in the one right order."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from autoprec.errors import ScalingError
from autoprec.runtime.finite import non_finite
from autoprec.runtime.loss_scale import BoundedGradScaler, is_fused
from autoprec.runtime.scaled_gradients import parameters_of


class Scheduler(Protocol):
    """What is advanced after a step: a learning rate scheduler of torch's, or anything with a `step()`."""

    def step(self) -> None:
        """Advance by one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undone:
    """A step that was undone: this many elements of this parameter, or of what is remembered of it, were not finite."""

    parameter: str
    num_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What came of a step.

    `is_known` says that whether it stepped is known already; of fused optimizers the device alone knows. `undone` says
    that the optimizers stepped on finite gradients, and that their update was not finite and was taken back.

    `grad_norm` is the norm of the unscaled gradients before clipping, a tensor; None if no `max_norm` was given. The
    properties read tensors when they are asked, and then wait for the device; without loss scaling they read nothing,
    unless steps that are not finite were to be skipped all the same.
    """

    grad_norm: torch.Tensor | None
    found_inf: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    minimum: float = 0.0
    is_known: bool = True
    undone: Undone | None = None

    @property
    def stepped(self) -> bool:
        """Return whether the optimizers stepped: False if a gradient was not finite and that was looked at."""
        return self.undone is None and (self.found_inf is None or not bool(self.found_inf))

    @property
    def loss_scale(self) -> float:
        """Return the scale that the gradients of this step had; 1 without scaling."""
        return 1.0 if self.scale is None else float(self.scale)

    @property
    def collapsed(self) -> bool:
        """Return whether the step overflowed at the smallest scale there is: going on will not mend it."""
        is_skipped = self.undone is None and not self.stepped
        return self.scale is not None and is_skipped and self.loss_scale <= self.minimum


def take_step(
    scaler: BoundedGradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
    scheduler: Scheduler | None = None,
    skip_non_finite: bool = False,
    loss: torch.Tensor | None = None,
    undo: Callable[[], Undone | None] | None = None,
) -> StepOutcome:
    """Return what came of one step of all `optimizers`, whose gradients come from the same scaled backward passes.

    Each one skips its step if its own gradients are not finite, as with `GradScaler`; the outcome and the scheduler
    count a step only if all of them stepped. The norm is over the gradients of all. Without loss scaling nothing waits
    for the device; with it, torch's own `GradScaler.step` does, but for fused optimizers. With `skip_non_finite` all
    skip if a gradient, or `loss` if given, is not finite, or beyond the limit: as `runtime.finite` has it. `undo` is
    asked after the step whether it had to take it back.
    Raises: `ScalingError`, before anything is done, for arguments that are no optimizers, norm or scheduler.
    """
    _check_arguments(optimizers, max_norm, scheduler)
    scale = scaler.scale_now()
    if max_norm is not None:
        for optimizer in optimizers:
            if not scaler.is_unscaled(optimizer):
                scaler.unscale_(optimizer)
    norm = None if max_norm is None else _clip(optimizers, max_norm)
    if skip_non_finite and not scaler.is_enabled():
        found_inf: torch.Tensor | None = non_finite(optimizers, norm, loss)
        _step_if_finite(optimizers, found_inf)
    else:
        with scaler.counting(_also_found(scaler, optimizers, norm, loss) if skip_non_finite else None, optimizers):
            for optimizer in optimizers:
                scaler.step(optimizer)
        found_inf = _found_inf(scaler, optimizers)
    undone = None if undo is None else undo()
    outcome = StepOutcome(
        grad_norm=norm,
        found_inf=found_inf,
        scale=scale,
        minimum=scaler.minimum,
        is_known=undone is not None or not any(map(is_fused, optimizers)),
        undone=undone,
    )
    scaler.update()
    if scheduler is not None and outcome.stepped:
        scheduler.step()
    return outcome


def _also_found(
    scaler: BoundedGradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    norm: torch.Tensor | None,
    loss: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return 1 if gradients are beyond the limit or the loss is not finite, which no scaler looks at, else 0."""
    if not scaler.is_enabled():
        return None
    is_scaled = not any(map(scaler.is_unscaled, optimizers))
    return non_finite(optimizers, norm, loss, scaler.scale_now() if is_scaled else None)


def _step_if_finite(optimizers: Sequence[torch.optim.Optimizer], found_inf: torch.Tensor | None) -> None:
    """Step all, or none; fused optimizers read `found_inf` on the device, others wait to know it."""
    for_device = [each for each in optimizers if found_inf is not None and is_fused(each)]
    others = [each for each in optimizers if each not in for_device]
    if not others or found_inf is None or not bool(found_inf):
        for optimizer in others:
            optimizer.step()
    for optimizer in for_device:
        with _told(optimizer, found_inf):
            optimizer.step()


@contextmanager
def _told(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor | None) -> Iterator[None]:
    """Have a fused optimizer skip where `found_inf` is 1, as `GradScaler` does."""
    vars(optimizer)["found_inf"] = found_inf
    try:
        yield
    finally:
        del vars(optimizer)["found_inf"]


def _check_arguments(
    optimizers: Sequence[torch.optim.Optimizer], max_norm: float | None, scheduler: Scheduler | None
) -> None:
    """Refuse what would fail half way through the step, or turn the gradients round.

    Raises: `ScalingError`.
    """
    if not optimizers:
        raise ScalingError("precision.step: no optimizer was given; write precision.step(optimizer)")
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise ScalingError(
                f"precision.step: {type(each).__name__} is no optimizer; write precision.step(optimizer), with several "
                "step(one, other), and the rest by name: max_norm=1.0, scheduler=scheduler"
            )
    if len({id(each) for each in optimizers}) < len(optimizers):
        raise ScalingError(
            f"precision.step: one of the {len(optimizers)} optimizers is given twice; give each once: step(one, other)"
        )
    if max_norm is not None and not max_norm > 0:
        raise ScalingError(
            f"precision.step: max_norm is {max_norm}; allowed: numbers above 0; leave it out for no clipping"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ScalingError(
            "precision.step: ReduceLROnPlateau steps on a metric, which precision.step has not; leave it out here and "
            "call scheduler.step(metric) after each evaluation"
        )


def warn_collapsed(outcome: StepOutcome) -> None:
    """Warn that the scale is at its end."""
    warnings.warn(
        f"a step overflowed at loss scale {outcome.loss_scale:g}, the smallest that the policy allows, and was "
        "skipped; precision.find_overflow(batch) names the site that it comes from (said once)",
        RuntimeWarning,
        stacklevel=3,
    )


def _clip(optimizers: Sequence[torch.optim.Optimizer], max_norm: float) -> torch.Tensor:
    parameters = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def _found_inf(scaler: BoundedGradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> torch.Tensor | None:
    found = [each for optimizer in optimizers if (each := scaler.found_inf(optimizer)) is not None]
    if not found:
        return None
    total = found[0]
    for each in found[1:]:
        total = total + each.to(total.device, non_blocking=True)
    return total
