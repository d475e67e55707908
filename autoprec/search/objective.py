"""The objective: a candidate really trains and is really timed, round by round beside one FP32 run."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from autoprec.measure import (
    Fidelity,
    Ratio,
    StepTooSlow,
    Training,
    compare,
    hopeless,
    measure_memory,
    speedup,
    step_deadline,
)
from autoprec.measure.step_time import clock_of, no_garbage_collection
from autoprec.policy import AS_GIVEN, Policy, preset
from autoprec.records.run import FidelityRecord, HealthRecord, Interval, MemoryRecord, TrialRecord
from autoprec.search.baselines import coarsest_format, rounding_of
from autoprec.search.same_arithmetic import computes_in_fp32, drifts_as_chaos, settled
from autoprec.search.study import Asked
from autoprec.workload import Workload
from autoprec.workload.origin import origin

Report: TypeAlias = Callable[[int, float], bool]

_WARMUP = 2
_ATTEMPTS = 3
_MIN_ROUNDS = 12  # so that one disturbed round does not end the interval of the speed-up
_MAX_STEPS_PER_ROUND = 4
_SLOW_ROUNDS = 3  # one round may be disturbed by anything
_HOPELESS_ROUNDS, _HOPELESS_TIMES = 2, 3.0
_MIN_DEADLINE_S = 0.25  # a hiccup of the machine is no slow step


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How every trial of a run is measured; two trials of one protocol can be compared."""

    workload: Workload
    device: str
    seed: int
    batches: Sequence[Any]
    horizon: int
    margin: float
    slow_limit: float

    @property
    def steps_per_round(self) -> int:
        """Return how many steps of a run are timed in one round."""
        return max(1, min((self.horizon - _WARMUP) // _MIN_ROUNDS, _MAX_STEPS_PER_ROUND))

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds; what they leave of the horizon comes first and is not timed."""
        return (self.horizon - _WARMUP) // self.steps_per_round

    def train(self, policy: Policy, *, nudge: float = 0.0) -> Training:
        """Return a fresh run under `policy`."""
        return Training(self.workload, policy, device=self.device, seed=self.seed, batches=self.batches, nudge=nudge)


class Chaos:
    """How far apart runs drift by themselves: FP32 nudged by one rounding of a format, trained once a format.

    `curves` holds the losses by format.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.curves: dict[str, tuple[float, ...]] = {}

    def of(self, policy: Policy) -> tuple[float, ...] | None:
        """Return the curve for the coarsest format of `policy`; None for plain FP32."""
        name, protocol = coarsest_format(policy), self._protocol
        if name is None:
            return None
        if name not in self.curves:
            with protocol.train(preset("fp32", protocol.device), nudge=rounding_of(name)) as nudged:
                self.curves[name] = tuple(nudged.step() for _ in range(protocol.horizon))
        return self.curves[name]


class Objective:
    """The FP32 run that stays alive, its curve, and the measurement of candidates beside it.

    At most two copies of model and optimizer state exist at a time: FP32 and one candidate.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self._clock = clock_of(protocol.device)
        self._reference = protocol.train(preset("fp32", protocol.device))
        steps = [self._timed_step(self._reference) for _ in range(protocol.horizon)]
        self.losses = tuple(loss for loss, _ in steps)
        self.first_step_s = steps[0][1]
        self.step_s = statistics.median(seconds for _, seconds in steps[min(_WARMUP, len(steps) - 1) :])
        self.chaos = Chaos(protocol)

    def close(self) -> None:
        """Free the FP32 run; nothing can be measured afterwards, until it is opened again. Idempotent."""
        self._reference.close()

    def reopen(self) -> None:
        """Build the FP32 run anew, to be timed beside further candidates; its curve is known."""
        self._reference = self.protocol.train(preset("fp32", self.protocol.device))
        for _ in range(_WARMUP):
            self._reference.step()

    def measure(self, asked: Asked, policy: Policy, key: str, report: Report) -> TrialRecord:
        """Return what a trial of `policy` measured; what it raises ends that trial and nothing else.

        `report` is told the ratio of step times after each round and says whether to stop.
        """
        started = time.perf_counter()
        blank = TrialRecord(
            number=asked.number, name=asked.name, kind=asked.kind, choice=asked.choice, key=key, state="failed"
        )
        try:
            record = self._attempts(policy, blank, report)
        except Exception as error:  # noqa: BLE001 kernels and workloads raise anything, and the study goes on
            where = origin(error)
            record = replace(blank, reason=f"{where + ': ' if where else ''}{type(error).__name__}: {error}")
        return replace(record, wall_s=time.perf_counter() - started)

    def _attempts(self, policy: Policy, blank: TrialRecord, report: Report) -> TrialRecord:
        """Measure again where FP32, timed right after a step that missed its deadline, is as slow: the machine was."""
        chaos = self.chaos.of(policy)
        for _ in range(_ATTEMPTS):
            try:
                gc.collect()  # what other runs left behind is not collected in steps of this one
                with no_garbage_collection(), self.protocol.train(policy) as candidate:
                    if candidate.emulated:
                        return self._untimed(candidate, chaos, blank, report)
                    return self._rounds(candidate, chaos, blank, report)
            except StepTooSlow as slow:
                _, fp32_s = self._timed_step(self._reference)
                if slow.elapsed_s > self.protocol.slow_limit * fp32_s:
                    break
        report(0, self.protocol.slow_limit)
        return replace(blank, state="pruned", reason=self._too_slow)

    def _rounds(
        self, candidate: Training, chaos: Sequence[float] | None, blank: TrialRecord, report: Report
    ) -> TrialRecord:
        """Train `candidate` to the horizon beside FP32, or to where it is sure to be unfaithful or too slow."""
        protocol, margin = self.protocol, self.protocol.margin
        is_bar = blank.kind == "baseline" and blank.name == "fp32"  # what all are held against is never cut short
        is_compiled = candidate.precision.policy.compile != AS_GIVEN
        started = time.perf_counter()
        losses = self._warm_up(candidate, math.inf if is_bar or is_compiled else protocol.slow_limit)
        warm_up_s = time.perf_counter() - started
        times: list[float] = []
        reference_times: list[float] = []
        stopped = ""

        def drifts() -> bool:
            """Return whether nothing can be told from this curve: FP32 by other kernels, no further off than chaos."""
            in_fp32 = chaos is not None and computes_in_fp32(candidate.precision.policy)
            return in_fp32 and chaos is not None and drifts_as_chaos(self.losses, losses, chaos)

        for number in range(protocol.num_rounds):
            ours, theirs, new = self._round(candidate, number)
            losses, times, reference_times = [*losses, *new], [*times, ours], [*reference_times, theirs]
            wants_stop = report(number, ours / theirs)
            if hopeless(self.losses, losses, margin, horizon=protocol.horizon) and not drifts():
                stopped = "unfaithful beyond doubt"
            elif not is_bar and self._is_too_slow(times, reference_times):
                stopped = self._too_slow
            elif wants_stop and blank.kind != "baseline":
                stopped = "slower than the best trial (Wilcoxon test)"
            if stopped:
                break
        length = len(losses)
        fidelity = None
        if not stopped or "unfaithful" in stopped:
            widened = None if chaos is None else chaos[:length]
            fidelity = compare(self.losses[:length], losses, margin=margin, chaos=widened)
            if not stopped:
                policy = candidate.precision.policy
                fidelity = settled(fidelity, protocol.train, policy, protocol.device, is_chaotic=drifts)
        return replace(
            blank,
            state="pruned" if stopped else "complete",
            reason=stopped,
            compile_s=warm_up_s if is_compiled else 0.0,
            step_s=statistics.median(times),
            reference_step_s=statistics.median(reference_times),
            speedup=interval_of(speedup(reference_times, times)),
            fidelity=None if fidelity is None else fidelity_record(fidelity),
            num_steps=length,
            num_skipped=candidate.num_skipped,
            memory=None if stopped else memory_record(candidate),
            health=None if stopped else _health_record(candidate),
            losses=tuple(losses),
            step_times_s=tuple(times),
            reference_step_times_s=tuple(reference_times),
        )

    def _untimed(
        self, candidate: Training, chaos: Sequence[float] | None, blank: TrialRecord, report: Report
    ) -> TrialRecord:
        """Train a `candidate` whose formats are emulated to the horizon, however long it takes, without a clock."""
        protocol = self.protocol
        losses: list[float] = []
        while len(losses) < protocol.horizon and not hopeless(
            self.losses, losses, protocol.margin, horizon=protocol.horizon
        ):
            losses.append(candidate.step())
        report(protocol.num_rounds - 1, 1.0)
        length = len(losses)
        fidelity = compare(
            self.losses[:length], losses, margin=protocol.margin, chaos=None if chaos is None else chaos[:length]
        )
        return replace(
            blank,
            state="complete" if length == protocol.horizon else "pruned",
            reason=f"{', '.join(candidate.emulated)} emulated: not timed",
            emulated=candidate.emulated,
            fidelity=fidelity_record(fidelity),
            num_steps=length,
            num_skipped=candidate.num_skipped,
            memory=memory_record(candidate) if length == protocol.horizon else None,
            health=_health_record(candidate) if length == protocol.horizon else None,
            losses=tuple(losses),
        )

    @property
    def _too_slow(self) -> str:
        return f"over {self.protocol.slow_limit:g}x slower than fp32"

    def _is_too_slow(self, times: Sequence[float], reference_times: Sequence[float]) -> bool:
        ratios = [ours / theirs for ours, theirs in zip(times, reference_times, strict=True)]
        is_hopeless = len(ratios) >= _HOPELESS_ROUNDS and min(ratios) > _HOPELESS_TIMES * self.protocol.slow_limit
        return is_hopeless or (len(ratios) >= _SLOW_ROUNDS and statistics.median(ratios) > self.protocol.slow_limit)

    def _warm_up(self, candidate: Training, slow_limit: float) -> list[float]:
        """Take the steps of the horizon that are not timed: the first ones, each under a deadline."""
        count = self.protocol.horizon - self.protocol.num_rounds * self.protocol.steps_per_round
        losses = []
        # A first step also pays for caches and kernels, and so did the first one of FP32.
        for limit in (max(self.first_step_s, self.step_s), *[self.step_s] * (count - 1)):
            # None where none is asked for: torch.compile would compile once more for the mode that watches it.
            deadline = math.isfinite(slow_limit)
            with step_deadline(max(slow_limit * limit, _MIN_DEADLINE_S)) if deadline else nullcontext():
                losses.append(candidate.step())
        self._reference.step()
        return losses

    def _round(self, candidate: Training, number: int) -> tuple[float, float, list[float]]:
        """Return the median step times of candidate and FP32 in one round, and the candidate's losses."""
        runs = [candidate, self._reference]
        if number % 2:
            runs.reverse()
        steps = {run: [self._timed_step(run) for _ in range(self.protocol.steps_per_round)] for run in runs}
        ours, theirs = (statistics.median(seconds for _, seconds in steps[run]) for run in (candidate, self._reference))
        return ours, theirs, [loss for loss, _ in steps[candidate]]

    def _timed_step(self, run: Training) -> tuple[float, float]:
        run.prepare()
        loss, seconds = self._clock(run.advance)
        return run.settle(loss), seconds


def interval_of(ratio: Ratio) -> Interval:
    """Return a speed-up as records hold it."""
    return Interval(value=ratio.median, low=ratio.low, high=ratio.high)


def fidelity_record(fidelity: Fidelity) -> FidelityRecord:
    """Return a fidelity as records hold it."""
    return FidelityRecord(
        verdict=fidelity.verdict,
        reason=fidelity.reason,
        horizon=fidelity.horizon,
        steps_lost_frac=fidelity.steps_lost_frac,
        lower_frac=fidelity.lower_frac,
        upper_frac=fidelity.upper_frac,
        margin=fidelity.margin,
        margin_asked=fidelity.margin_asked,
        chaos_frac=fidelity.chaos_frac,
        power_frac=fidelity.power_frac,
        growth_p_value=fidelity.trend.p_value,
        projected_frac=fidelity.trend.projected_frac,
        by_first_step=fidelity.by_first_step,
    )


def memory_record(training: Training) -> MemoryRecord:
    """Return what a run holds, as records hold it. Costs a step."""
    use = measure_memory(training)
    return MemoryRecord(
        total_bytes=use.total_bytes,
        saved_bytes=use.saved_bytes,
        parameter_bytes=use.parameter_bytes,
        gradient_bytes=use.gradient_bytes,
        optimizer_bytes=use.optimizer_bytes,
    )


def _health_record(training: Training) -> HealthRecord:
    look, scaler = training.look_at_gradients(), training.precision.scaler
    return HealthRecord(
        loss_scale=scaler.get_scale() if scaler.is_enabled() else None,
        flush_frac=look.flush_frac,
        layer_flush_frac=max(look.flush, default=None),
        overflow_frac=look.overflow_frac,
    )
