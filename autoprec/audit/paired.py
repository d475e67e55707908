"""The paired run: FP32 and a policy side by side on the same batches, trained, timed, weighed, in one go."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoprec.errors import WorkloadError
from autoprec.measure import (
    Energy,
    Fidelity,
    MemoryUse,
    Ratio,
    StepTooSlow,
    Training,
    compare,
    energy_meter,
    hopeless,
    measure_memory,
    speedup,
    step_deadline,
)
from autoprec.measure.fidelity import MIN_HORIZON
from autoprec.measure.step_time import clock_of, no_garbage_collection
from autoprec.policy import AS_GIVEN, Policy, preset
from autoprec.search.objective import Chaos, Protocol
from autoprec.search.prove import Curve, evaluate_missed, evaluated
from autoprec.workload import Workload
from autoprec.workload.batches import tensors_of

MARGIN = 0.01
SLOW_LIMIT = 20.0

# A tie contains 1, but an interval that is wide enough contains everything: the median has to be near 1 too.
_TIE_FLOOR = 0.9

_WARMUP = 2
_STEPS_PER_ROUND = 2
_MIN_DEADLINE_S = 2.0  # a hiccup of the machine is no slow step
_LOOK_EVERY = 8
_REFERENCE, _POLICY = "fp32", "policy"


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What FP32 and a policy did side by side; `reference` and `candidate` hold their losses and `evaluate`.

    `times_s` are the step times of both, one a round, and `energy` the joules of both, where they can be told.
    `stopped` says why the policy did not reach the horizon: it is far too slow, or its loss is beyond hope; its memory
    is None then. With `emulated` formats there are no times. Curves that could not tell at the horizon asked for were
    gone on with: `undecided` says what they told there, and `protocol` has the horizon that they went on to.
    """

    protocol: Protocol
    policy: Policy
    reference: Curve
    candidate: Curve
    times_s: Mapping[str, tuple[float, ...]]
    energy: Energy | None
    memory: Mapping[str, MemoryUse]
    num_samples: int
    emulated: tuple[str, ...] = ()
    stopped: str = ""
    undecided: str = ""

    @property
    def speedup(self) -> Ratio | None:
        """Return how many times faster than FP32 the policy is; None if it was not timed."""
        ours = self.times_s.get(_POLICY, ())
        return speedup(self.times_s[_REFERENCE], ours) if ours else None

    @property
    def is_tie(self) -> bool:
        """Return whether the policy is as fast as FP32 within the spread, and about so by the median."""
        ratio = self.speedup
        return ratio is not None and ratio.high >= 1 and ratio.median >= _TIE_FLOOR

    @property
    def reference_step_s(self) -> float:
        """Return the step time of FP32."""
        return statistics.median(self.times_s[_REFERENCE])

    def fidelity(self, margin: float) -> Fidelity:
        """Return how faithfully the policy follows FP32; a margin it misses is widened by the chaos of the workload."""
        length = len(self.candidate.losses)
        curves = self.reference.losses[:length], self.candidate.losses
        found = compare(*curves, margin=margin)
        if found.verdict == "faithful" or not math.isfinite(found.steps_lost_frac):
            return found
        nudged = Chaos(self.protocol).of(self.policy)
        return found if nudged is None else compare(*curves, margin=margin, chaos=nudged[:length])

    @property
    def missed(self) -> str:
        """Return what is wrong with the policy's `evaluate`, or an empty text."""
        return evaluate_missed(self.reference, self.candidate)


def train_paired(
    workload: Workload,
    policy: Policy,
    kind: str,
    seed: int,
    batches: Sequence[Any],
    horizon: int,
    *,
    margin: float = MARGIN,
    longest: int = 1,
) -> Paired:
    """Return FP32 and `policy` trained over `horizon` steps in rounds whose order turns.

    Curves that are inconclusive at `margin` then are gone on with, over the same batches once more, to `longest` times
    the horizon. Chaos, which can only widen the margin, is not asked before the end: it takes a third run.

    At most two copies of model and optimizer state exist at a time.

    Raises: `WorkloadError` if the FP32 loss is not finite.
    """
    protocol = Protocol(
        workload=workload,
        device=kind,
        seed=seed,
        batches=batches,
        horizon=horizon,
        margin=margin,
        slow_limit=SLOW_LIMIT,
    )
    with protocol.train(preset("fp32", kind)) as reference, protocol.train(policy) as candidate:
        return _Side(protocol, {_REFERENCE: reference, _POLICY: candidate}).by_side(policy, longest)


class _Side:
    """Both runs of a pair and what is noted about them."""

    def __init__(self, protocol: Protocol, runs: Mapping[str, Training]) -> None:
        self._protocol, self._runs = protocol, runs
        self._clock = clock_of(protocol.device)
        self._times: dict[str, list[float]] = {name: [] for name in runs}
        self._meter = energy_meter(protocol.device)
        self._joules: dict[str, list[float]] = {name: [] for name in runs}

    def by_side(self, policy: Policy, longest: int) -> Paired:
        """Return the pair, trained to the horizon, to `longest` times it, or to where the policy has no hope."""
        runs = self._runs
        before = evaluated(self._protocol, runs[_REFERENCE])  # the policy may be far too slow to be evaluated
        stopped = self._warm_up() or self._to_horizon()
        undecided = self._undecided() if longest > 1 and not stopped else ""
        if undecided:
            self._protocol = replace(self._protocol, horizon=longest * self._protocol.horizon)
            stopped = self._to_horizon()
        protocol = self._protocol
        after = {name: None if stopped else evaluated(protocol, run) for name, run in runs.items()}
        memory = {} if stopped else {name: measure_memory(run) for name, run in runs.items()}
        curves = {
            name: Curve(
                losses=tuple(run.losses[: protocol.horizon]), evaluate_before=before, evaluate_after=after[name]
            )
            for name, run in runs.items()
        }
        emulated = runs[_POLICY].emulated
        return Paired(
            protocol=protocol,
            policy=policy,
            reference=curves[_REFERENCE],
            candidate=curves[_POLICY],
            times_s={} if emulated else {name: tuple(times) for name, times in self._times.items()},
            energy=Energy.of(self._joules[_REFERENCE], self._joules[_POLICY]) if self._meter and not emulated else None,
            memory=memory,
            num_samples=num_samples(protocol.batches[0]),
            emulated=emulated,
            stopped=stopped,
            undecided=undecided,
        )

    def _to_horizon(self) -> str:
        """Train both to the horizon; return why the policy did not get there, or an empty text."""
        horizon, ours, stopped = self._protocol.horizon, self._runs[_POLICY], ""
        while not stopped and ours.num_steps < horizon:
            self._round(min(_STEPS_PER_ROUND, horizon - ours.num_steps))
            stopped = self._hopeless()
        return stopped

    def _undecided(self) -> str:
        """Return what curves say that cannot tell; an empty text of those that can, and of those too short to ask."""
        curves = [tuple(self._runs[name].losses[: self._protocol.horizon]) for name in (_REFERENCE, _POLICY)]
        if min(map(len, curves)) < MIN_HORIZON:
            return ""
        found = compare(curves[0], curves[1], margin=self._protocol.margin)
        return found.reason if found.verdict == "inconclusive" else ""

    def _warm_up(self) -> str:
        """Take the steps that are not timed, the policy's under a deadline; return why to stop, or an empty text."""
        limit = _MIN_DEADLINE_S
        for _ in range(_WARMUP):
            seconds = self._step(_REFERENCE)
            limit = max(SLOW_LIMIT * seconds, _MIN_DEADLINE_S)
            run = self._runs[_POLICY]
            if run.emulated or run.precision.policy.compile != AS_GIVEN:  # the mode that watches would be compiled in
                self._step(_POLICY)
                continue
            try:
                with step_deadline(limit):
                    self._step(_POLICY)
            except StepTooSlow:
                return f"a step takes over {SLOW_LIMIT:g} times as long as one of fp32"
        return ""

    def _round(self, steps: int) -> None:
        forward = len(self._times[_POLICY]) % 2 == 0
        for name in (_REFERENCE, _POLICY) if forward else (_POLICY, _REFERENCE):
            with no_garbage_collection():
                joules = self._meter() if self._meter else 0.0
                self._times[name].append(statistics.median(self._step(name) for _ in range(steps)))
                if self._meter:
                    self._joules[name].append((self._meter() - joules) / steps)

    def _hopeless(self) -> str:
        reference, ours = self._runs[_REFERENCE].losses, self._runs[_POLICY].losses
        bad = next((step for step, loss in enumerate(reference) if not math.isfinite(loss)), None)
        if bad is not None:
            raise WorkloadError(
                f"the loss of fp32 is {reference[bad]} at step {bad + 1}: the workload is broken, not the precision; "
                "make it train in FP32 first (lower learning rate, clipped gradients, clean data)"
            )
        if len(ours) % _LOOK_EVERY and math.isfinite(ours[-1]):
            return ""
        no_hope = hopeless(reference, ours, self._protocol.margin, horizon=self._protocol.horizon)
        return f"unfaithful beyond doubt after {len(ours)} steps" if no_hope else ""

    def _step(self, name: str) -> float:
        run = self._runs[name]
        run.prepare()
        loss, seconds = self._clock(run.advance)
        run.settle(loss)
        return seconds


def num_samples(batch: Any) -> int:
    """Return how many samples a batch has: the first size of its first tensor that has any; 1 without one."""
    return next((int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.dim()), 1)
