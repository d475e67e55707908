"""Training: one run of a workload under a policy, step by step, repeatable and paired with others of its seed."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch

from autoprec.errors import MeasurementError, WorkloadError
from autoprec.policy import Policy
from autoprec.runtime import Precision, apply
from autoprec.runtime.device import emulated_formats
from autoprec.runtime.guard.looks import GradientLook, look_at_gradients, narrow_layers
from autoprec.runtime.matmul_precision import restore, set_float32_matmul
from autoprec.runtime.trace import Trace
from autoprec.workload import Workload
from autoprec.workload.parts import build_model, build_optimizer, check_loss
from autoprec.workload.seeding import MODEL_STREAM, mixed, seeded

_NUDGE_STREAM = 2**31


class Training:
    """One run of `workload` under `policy` (a `Policy`, a file or a preset) on `batches` that lie on `device`.

    Two runs with one `seed` start from the same weights, see the same batches and draw the same random numbers in each
    step, whatever their policies. `nudge` multiplies every initial weight by 1 + nudge * N(0, 1). Random states and
    matmul precision of the caller are as before after construction and after each step.

    `emulated` holds the formats that this device emulates: such a run shows a fidelity, and must not be timed.
    `losses` holds the loss of each step; `num_skipped` counts steps in which the loss scaler found an overflow.
    `step()` does it all. To time a step, call `prepare()`, `advance()` and `settle()` and time `advance()` alone.

    Raises: `WorkloadError` on the first step if the loss is not a scalar tensor that requires grad.
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy | str | PathLike[str],
        *,
        device: str | torch.device,
        seed: int,
        batches: Sequence[Any],
        nudge: float = 0.0,
    ) -> None:
        if len(batches) == 0:
            raise WorkloadError("training needs at least one batch and got an empty sequence; check batches()")
        self.device = torch.device(device)
        self.losses: list[float] = []
        self.num_skipped = 0
        self._workload, self._batches, self._seed = workload, batches, seed
        self._closed = False
        self._num_before = 0
        self._scope = ExitStack()
        self._updated: list[torch.Tensor | None] = []
        with seeded(seed, MODEL_STREAM, self.device):
            model = build_model(workload, self.device)
        if nudge:
            _nudge(model, nudge, seed)
        self.model = model
        self.precision: Precision = _apply_without_leaking(model, policy, self.device)
        formats = self.precision.policy.formats
        self.emulated = tuple(name for name in formats if name in emulated_formats(self.device.type))
        self.optimizer = self.precision.optimizer(build_optimizer(workload.optimizer, model))
        self._hook = self.optimizer.register_step_post_hook(self._note_update)

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """Return the number of steps trained, skipped ones and those before a checkpoint included."""
        return self._num_before + len(self.losses)

    def step(self) -> float:
        """Train one step and return its loss, as it is even if it is not finite."""
        self.prepare()
        return self.settle(self.advance())

    def trace(self) -> Trace:
        """Return in which formats the kernels of the next step run; training goes on as if it had not been asked.

        Raises: `TraceError` if the model holds compiled modules.
        """
        self.prepare()
        with self._scope:
            return self.precision.trace(self._batches[self.num_steps % len(self._batches)], self._workload.loss)

    def look_at_gradients(self) -> GradientLook:
        """Return what becomes of gradients in narrow formats, from one more backward pass where there are such layers.

        Parameters stay as they are; gradients are gone, and buffers have seen one more batch.
        """
        if next(narrow_layers(self.precision), None) is None:
            return GradientLook()
        self.prepare()
        with self._scope:
            self.optimizer.zero_grad()
            with self.precision.loss():
                loss = self._workload.loss(self.model, self._batches[self.num_steps % len(self._batches)])
            self.precision.scaler.scale(loss).backward()
            look = look_at_gradients(self.precision)
            self.optimizer.zero_grad()
        return look

    def prepare(self) -> None:
        """Enter the random streams and the matmul precision of the next step."""
        if self._closed:
            raise MeasurementError("training: a step was asked of a run that is closed; build a new one")
        self._updated.clear()
        self._scope.enter_context(seeded(self._seed, self.num_steps + 1, self.device))
        found = set_float32_matmul(self.device.type, self.precision.policy.float32_matmul)
        self._scope.callback(restore, found)

    def advance(self) -> torch.Tensor:
        """Run one step as a training loop does, and return the loss; must follow `prepare()`."""
        try:
            return self._advance(self._batches[self.num_steps % len(self._batches)])
        except BaseException:
            self._scope.close()
            raise

    def settle(self, loss: torch.Tensor) -> float:
        """Leave what `prepare()` entered, count the step, and return `loss` as a number."""
        self._scope.close()
        self.losses.append(float(loss))
        if not self._updated or any(bool(found) for found in self._updated if found is not None):
            self.num_skipped += 1
        return self.losses[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return what a training script saves: the states of model, optimizer and precision, and the steps done."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_policy: bool = False) -> None:
        """Go on where the run that saved `state` stood: its next batch, and the random numbers of its next step.

        `other_policy`: only model and optimizer are taken, as `Precision.load_state_dict` asks for then.
        """
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if not other_policy:
            self.precision.load_state_dict(state["precision"])
        self._num_before = int(state["num_steps"]) - len(self.losses)

    def close(self) -> None:
        """Take the policy out and free model and optimizer. Idempotent."""
        self._scope.close()
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        previous = set_float32_matmul(self.device.type, "ieee")
        self.precision.remove()
        restore(previous)
        del self.model, self.optimizer, self.precision, self._batches
        gc.collect()  # a model that refers to itself is not freed by reference counts

    def _advance(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        with self.precision.loss():
            loss = self._workload.loss(self.model, batch)
        if self.num_steps == 0:
            check_loss(loss)
        scaler = self.precision.scaler
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        return loss.detach()

    def _note_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note that the optimizer stepped; a fused one is always called and skips by itself where `found_inf` is 1."""
        self._updated.append(getattr(optimizer, "found_inf", None))


def _apply_without_leaking(
    model: torch.nn.Module, policy: Policy | str | PathLike[str], device: torch.device
) -> Precision:
    """Apply `policy` but leave the process-wide matmul precision alone: other runs take turns with this one."""
    previous = set_float32_matmul(device.type, "ieee")
    try:
        return apply(model, policy)
    finally:
        restore(previous)


def _nudge(model: torch.nn.Module, nudge: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(mixed(seed, _NUDGE_STREAM))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.mul_(1 + nudge * noise.to(parameter.device))
