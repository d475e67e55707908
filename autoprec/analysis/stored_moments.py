"""Optimizer state stored in a low format: moments that flush or freeze, and an eps that vanishes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoprec.analysis.optimizer_twin import Twin
from autoprec.analysis.short_run import ShortRun
from autoprec.analysis.stored_values import StoredFault, StoredVerdict, frac, percent, relative_error, scale_of, stored
from autoprec.runtime.rounding import round_to

# A step that differs from FP32's by more than this fraction of it is another step.
STEP_ERROR = 0.1
# A moment of which this fraction stays where it is without gradients does not decay.
FROZEN_FRAC = 0.5
# A frozen moment is followed for so many steps without gradient.
NUM_QUIET_STEPS = 100
NUM_QUIET_ELEMENTS = 256
# By how much more of it must be left then than in FP32.
EXCESS_LEFT = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """What is known of optimizer state: faults by moment, and names of parameters that could not be followed.

    An optimizer whose step is not elementwise does something else to a sample of a tensor than to the tensor.
    """

    faults: tuple[StoredFault, ...]
    not_followed: tuple[str, ...]


def moments(run: ShortRun, formats: Sequence[str]) -> Moments:
    """Return what each part of the optimizer's state does if that part alone is stored low.

    The optimizer itself steps on the sampled elements with the gradients of the run; after each step the state is
    rounded.
    """
    names = tuple(each.name for each in run.parameters)
    if run.num_steps == 0 or not names:
        return Moments(faults=(), not_followed=())
    reference = run.twin()
    try:
        for step in range(run.num_steps):
            reference.step(run.gradients(step))
    except (RuntimeError, TypeError, ValueError):  # an optimizer that asks for a shape
        return Moments(faults=(), not_followed=names)
    ends = reference.values()
    followed = [index for index in range(len(names)) if _is_followed(run, ends[index], index)]
    faults = [
        fault
        for key in reference.moment_names()
        for name in formats
        for fault in _LowMoment(run, reference, key, name).faults(followed)
    ]
    return Moments(
        faults=tuple(faults),
        not_followed=tuple(name for index, name in enumerate(names) if index not in set(followed)),
    )


def _is_followed(run: ShortRun, end: torch.Tensor, index: int) -> bool:
    """Return whether the twin did to the sampled elements what the optimizer did to the whole tensor."""
    values = run.parameters[index].values
    return relative_error(end - values[0], values[-1] - values[0]) < 1e-2


class _LowMoment:
    """One run of the optimizer on the sampled elements with the state called `key` in a low format."""

    def __init__(self, run: ShortRun, reference: Twin, key: str, format_name: str) -> None:
        self._run, self._key, self._format = run, key, format_name
        self._exact, self._wanted = reference.state(key), reference.values()
        twin = run.twin()
        for step in range(run.num_steps):
            twin.step(run.gradients(step))
            twin.round_state(key, format_name)
        self._stored, self._ends = twin.state(key), twin.values()
        twin.step([torch.zeros_like(each.values[0]) for each in run.parameters])
        self._quiet = twin.state(key)  # what a step without gradient makes of it, before that is stored
        self._left = self._decay()

    def faults(self, followed: Sequence[int]) -> Iterator[StoredFault]:
        """Yield one entry for each parameter among `followed` that has this state."""
        for index in followed:
            if index in self._stored:
                yield self._fault(index)

    def _fault(self, index: int) -> StoredFault:
        before, start = self._stored[index], self._run.parameters[index].values[0]
        again = stored(self._quiet[index], self._format)
        numbers = {
            "step_error": relative_error(self._ends[index] - start, self._wanted[index] - start),
            "flushed_frac": frac(before == 0, self._exact[index] != 0),
            "frozen_frac": frac((again == before) & (before != 0), self._quiet[index] != before),
            **self._left[index],
        }
        return StoredFault(
            part=self._key, name=self._run.parameters[index].name, format=self._format, verdict=_verdict(numbers),
            reason=_reason(numbers, self._run.num_steps), numbers=numbers,
        )  # fmt: skip

    def _decay(self) -> dict[int, dict[str, float]]:
        """Return what is left of the state after quiet steps, in FP32 and stored low, of some elements of each tensor.

        Each quiet step multiplies an element by what the first one did. FP8's scales are those of the start.
        """
        starts = {index: each[:NUM_QUIET_ELEMENTS] for index, each in self._stored.items()}
        scales = {index: scale_of(each, self._format) for index, each in starts.items()}
        if not starts:
            return {}
        before = torch.cat([each * scales[index] for index, each in starts.items()])
        after = torch.cat([self._quiet[index][:NUM_QUIET_ELEMENTS] * scales[index] for index in starts])
        factor = torch.where(before == 0, 1.0, after / before)
        low = before
        for _ in range(NUM_QUIET_STEPS):
            low = round_to(low * factor, self._format)
        exact = before.double() * factor.double() ** NUM_QUIET_STEPS
        parts = zip(
            *(each.split([one.numel() for one in starts.values()]) for each in (before, exact, low)), strict=True
        )
        return {
            index: {"quiet_steps": float(NUM_QUIET_STEPS), "left_in_fp32": _left(exact, before),
                    "left_in_low": _left(low, before)}
            for index, (before, exact, low) in zip(starts, parts, strict=True)
        }  # fmt: skip


def _left(after: torch.Tensor, before: torch.Tensor) -> float:
    start = float(before.double().norm())
    return float(after.double().norm()) / start if start else 1.0


def _freezes(numbers: Mapping[str, float]) -> bool:
    """Return whether most elements stay where they are without gradient, and that keeps up what FP32 lets go."""
    return numbers["frozen_frac"] >= FROZEN_FRAC and numbers["left_in_low"] > numbers["left_in_fp32"] + EXCESS_LEFT


def _verdict(numbers: Mapping[str, float]) -> StoredVerdict:
    return "needs_fp32" if numbers["step_error"] > STEP_ERROR or _freezes(numbers) else "fine"


def _reason(numbers: Mapping[str, float], num_steps: int) -> str:
    error, flushed = numbers["step_error"], numbers["flushed_frac"]
    if not math.isfinite(error):
        return f"{percent(flushed)} of it becomes 0 and {num_steps} steps end in inf or nan"
    if error > STEP_ERROR:
        return f"{num_steps} steps are {percent(error)} off" + (
            f", as {percent(flushed)} of it becomes 0" if flushed else ""
        )
    if _freezes(numbers):
        return (
            f"it does not decay: after {NUM_QUIET_STEPS} steps without gradient {percent(numbers['left_in_low'])} is "
            f"left, and in FP32 {percent(numbers['left_in_fp32'])}"
        )
    return f"{num_steps} steps are {percent(error)} off"
