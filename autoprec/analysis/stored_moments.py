"""Optimizer state stored in a low format: moments that flush or freeze, and an eps that vanishes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoprec.analysis.optimizer_twin import Twin
from autoprec.analysis.short_run import ShortRun
from autoprec.analysis.stored_values import StoredFault, StoredVerdict, frac, relative_error, stored

# A step that differs from FP32's by more than this fraction of it is another step.
STEP_ERROR = 0.1
# A moment of which this fraction stays where it is without gradients does not decay.
FROZEN_FRAC = 0.5
# A frozen moment is followed for so many steps without gradient.
NUM_QUIET_STEPS = 100
NUM_QUIET_ELEMENTS = 256


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
    if run.num_steps == 0 or not run.parameters:
        return Moments(faults=(), not_followed=())
    reference = run.twin()
    for step in range(run.num_steps):
        reference.step(_gradients(run, step))
    followed = [index for index in range(len(run.parameters)) if _is_followed(run, reference, index)]
    keys = dict.fromkeys(key for index in followed for key in reference.moments(index))
    faults = [
        fault for key in keys for name in formats for fault in _LowMoment(run, reference, key, name).faults(followed)
    ]
    followed_names = {run.parameters[index].name for index in followed}
    return Moments(
        faults=tuple(faults),
        not_followed=tuple(each.name for each in run.parameters if each.name not in followed_names),
    )


def _gradients(run: ShortRun, step: int) -> list[torch.Tensor | None]:
    return [each.gradients[step] for each in run.parameters]


def _is_followed(run: ShortRun, twin: Twin, index: int) -> bool:
    """Return whether the twin did to the sampled elements what the optimizer did to the whole tensor."""
    values = run.parameters[index].values
    return relative_error(twin.values[index].detach() - values[0], values[-1] - values[0]) < 1e-2


class _LowMoment:
    """One run of the optimizer on the sampled elements with the state called `key` in a low format."""

    def __init__(self, run: ShortRun, reference: Twin, key: str, format_name: str) -> None:
        self._run, self._reference, self._key, self._format = run, reference, key, format_name
        self._twin = run.twin()
        for step in range(run.num_steps):
            self._twin.step(_gradients(run, step))
            self._round()
        self._stored = self._state()
        self._ends = [value.detach().clone() for value in self._twin.values]
        self._twin.step([torch.zeros_like(each.values[0]) for each in run.parameters])
        self._quiet = self._state()  # what a step without gradient makes of it, before that is stored

    def faults(self, followed: Sequence[int]) -> Iterator[StoredFault]:
        """Yield one entry for each parameter among `followed` that has this state."""
        for index in followed:
            if index in self._stored:
                yield self._fault(index)

    def _fault(self, index: int) -> StoredFault:
        parameter, before = self._run.parameters[index], self._stored[index]
        start, wanted = parameter.values[0], self._reference.values[index].detach()
        exact = self._reference.moments(index)[self._key]
        again = stored(self._quiet[index], self._format)
        numbers = {
            "step_error": relative_error(self._ends[index] - start, wanted - start),
            "flushed_frac": frac(before == 0, exact != 0),
            "frozen_frac": frac((again == before) & (before != 0), self._quiet[index] != before),
        }
        numbers |= self._decay(index) if numbers["frozen_frac"] >= FROZEN_FRAC else {}
        return StoredFault(
            part=self._key, name=parameter.name, format=self._format, verdict=_verdict(numbers),
            reason=_reason(numbers, self._run.num_steps), numbers=numbers,
        )  # fmt: skip

    def _decay(self, index: int) -> dict[str, float]:
        """Return what is left of the state after quiet steps, in FP32 and stored low, of some of its elements.

        Each quiet step multiplies an element by what the first one did.
        """
        before = self._stored[index].reshape(-1)[:NUM_QUIET_ELEMENTS]
        factor = torch.where(before == 0, 1.0, self._quiet[index].reshape(-1)[:NUM_QUIET_ELEMENTS] / before)
        low = before
        for _ in range(NUM_QUIET_STEPS):
            low = stored(low * factor, self._format)
        first = float(before.double().norm())
        exact = before.double() * factor.double() ** NUM_QUIET_STEPS
        return {
            "quiet_steps": float(NUM_QUIET_STEPS),
            "left_in_fp32": float(exact.norm()) / first if first else 1.0,
            "left_in_low": float(low.double().norm()) / first if first else 1.0,
        }

    def _round(self) -> None:
        for index in range(len(self._run.parameters)):
            moment = self._twin.moments(index).get(self._key)
            if moment is not None:
                moment.copy_(stored(moment, self._format))

    def _state(self) -> dict[int, torch.Tensor]:
        states = {index: self._twin.moments(index).get(self._key) for index in range(len(self._run.parameters))}
        return {index: state.clone() for index, state in states.items() if state is not None}


def _verdict(numbers: Mapping[str, float]) -> StoredVerdict:
    is_bad = numbers["step_error"] > STEP_ERROR or numbers["frozen_frac"] >= FROZEN_FRAC
    return "needs_fp32" if is_bad else "fine"


def _reason(numbers: Mapping[str, float], num_steps: int) -> str:
    error, flushed = numbers["step_error"], numbers["flushed_frac"]
    if not math.isfinite(error):
        return f"{flushed:.0%} of it becomes 0 and {num_steps} steps end in inf or nan"
    if error > STEP_ERROR:
        size = f"{error:.0%}" if error < 10 else f"{error:.3g} times"
        return f"{num_steps} steps are {size} off" + (f": {flushed:.0%} of it becomes 0" if flushed else "")
    if numbers["frozen_frac"] >= FROZEN_FRAC:
        return (
            f"it does not decay: after {NUM_QUIET_STEPS} steps without gradient {numbers['left_in_low']:.0%} is left, "
            f"and in FP32 {numbers['left_in_fp32']:.0%}"
        )
    return f"{num_steps} steps are {error:.1%} off"
