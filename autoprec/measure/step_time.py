"""Step time: interleaved rounds on the clock of the device, and speed-ups with confidence intervals."""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import scipy.special
import torch

from autoprec.errors import MeasurementError

CONFIDENCE = 0.95
MIN_ROUNDS = 9  # the first number of rounds from which one disturbed round cannot be an end of the 95 % interval
Clock: TypeAlias = Callable[[Callable[[], Any]], tuple[Any, float]]


@runtime_checkable
class Phased(Protocol):
    """A step in three phases of which `advance` alone is timed; `Training` is one."""

    def prepare(self) -> None:
        """Do what a training loop would not do."""

    def advance(self) -> Any:
        """Run the step."""

    def settle(self, result: Any) -> object:
        """Take what `advance` returned."""


Run: TypeAlias = Callable[[], object] | Phased


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Median ratio of times over `num_rounds` paired rounds and its 95 % confidence interval [`low`, `high`].

    Fewer than six rounds bound nothing: the interval is then [0, inf].
    """

    median: float
    low: float
    high: float
    num_rounds: int

    @property
    def is_tie(self) -> bool:
        """Return whether the interval contains 1."""
        return self.low <= 1 <= self.high

    @property
    def half_width(self) -> float:
        """Return half the interval as a fraction of the median."""
        return (self.high - self.low) / 2 / self.median


def speedup(reference: Sequence[float], candidate: Sequence[float]) -> Ratio:
    """Return how many times faster `candidate` is: the median of reference / candidate, paired within rounds.

    The interval lies between two order statistics, so it assumes no distribution, only rounds that are independent;
    its coverage is at least 95 % (96.9 % for 6 rounds, 95.9 % for 20).
    Raises: `MeasurementError` if the rounds do not pair or a time is not a positive number.
    Source: David and Nagaraja 2003, Order Statistics, section 7.1.
    """
    if len(reference) != len(candidate) or not reference:
        raise MeasurementError(
            f"speed-up: {len(reference)} reference rounds and {len(candidate)} candidate rounds do not pair; "
            "pass times of the same interleaved rounds, at least one"
        )
    unusable = [seconds for seconds in (*reference, *candidate) if not 0 < seconds < math.inf]
    if unusable:
        raise MeasurementError(f"speed-up: {unusable[0]} s is not a step time; if the step is empty, time more of it")
    ratios = sorted(slow / fast for slow, fast in zip(reference, candidate, strict=True))
    rank = _rank_of_bound(len(ratios))
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (0.0, math.inf)
    return Ratio(median=statistics.median(ratios), low=low, high=high, num_rounds=len(ratios))


def interleave(
    runs: Mapping[str, Run],
    *,
    rounds: int,
    steps_per_round: int = 3,
    warmup: int = 2,
    device: str | torch.device = "cpu",
    clock: Clock | None = None,
) -> Mapping[str, tuple[float, ...]]:
    """Return for each run its median step time in each round, on the clock of `device` unless `clock` is given.

    A round takes `steps_per_round` steps of every run, one run after the other; the order turns and reverses from round
    to round, so that drift of the machine hits all runs alike. `warmup` steps of each run are not timed.
    *Units*: seconds.
    """
    timed = _rounds(runs, steps_per_round, warmup, clock or clock_of(device))
    return _collect(runs, itertools.islice(timed, _at_least_one("rounds", rounds)))


def interleave_until(
    runs: Mapping[str, Run],
    reference: str,
    *,
    half_width: float,
    max_rounds: int,
    max_s: float = math.inf,
    min_rounds: int = MIN_ROUNDS,
    steps_per_round: int = 3,
    warmup: int = 2,
    device: str | torch.device = "cpu",
) -> Mapping[str, tuple[float, ...]]:
    """Return step times as `interleave` does, from as many rounds as make every speed-up over `reference` precise.

    Ends when half of each interval is at most `half_width` (a fraction) wide, after `max_rounds`, or with the first
    round that ends after `max_s` seconds; look at `Ratio.half_width` to see which.
    Stopping on a narrow interval favors samples that look calmer than they are: expect the 95 % to cover a few points
    less after an early stop (asymptotically nothing is lost: Chow and Robbins 1965, Annals of Mathematical Statistics
    36(2), 457-462). It does not favor one run over another, as stopping on a significant result would.
    """
    if reference not in runs:
        raise MeasurementError(f'step time: reference "{reference}" is not among the runs: {", ".join(runs)}')
    end = time.perf_counter() + max_s
    rounds: list[Mapping[str, float]] = []
    for timed in itertools.islice(
        _rounds(runs, steps_per_round, warmup, clock_of(device)), _at_least_one("rounds", max_rounds)
    ):
        rounds.append(timed)
        precise = len(rounds) >= min_rounds and _widest(_collect(runs, rounds), reference) <= half_width
        if precise or time.perf_counter() >= end:
            break
    return _collect(runs, rounds)


def clock_of(device: str | torch.device) -> Clock:
    """Return the function that calls its argument and returns the result and the seconds it took on `device`."""
    kind = torch.device(device).type
    if kind not in _CLOCKS:
        raise MeasurementError(f'step time: no clock for device "{kind}"; there are clocks for {", ".join(_CLOCKS)}')
    return _CLOCKS[kind]


def _host_time(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def _event_time(call: Callable[[], Any]) -> tuple[Any, float]:
    """Time between two events of the stream. It starts idle, so waiting for the host to launch kernels counts too."""
    started = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    started.record()
    result = call()
    ended.record()
    ended.synchronize()
    return result, started.elapsed_time(ended) / 1e3


def _mps_time(call: Callable[[], Any]) -> tuple[Any, float]:
    torch.mps.synchronize()
    started = time.perf_counter()
    result = call()
    torch.mps.synchronize()
    return result, time.perf_counter() - started


_CLOCKS: Mapping[str, Clock] = MappingProxyType({"cpu": _host_time, "cuda": _event_time, "mps": _mps_time})


def _rounds(runs: Mapping[str, Run], steps: int, warmup: int, clock: Clock) -> Iterator[Mapping[str, float]]:
    """Warm up, then yield the median step time of each run, round after round."""
    _at_least_one("runs", len(runs))
    _at_least_one("steps_per_round", steps)
    for name, run in runs.items():
        _refuse_emulated(name, run)
    for run in runs.values():
        for _ in range(warmup):
            _time_step(run, clock)
    for number in itertools.count():
        times = {}
        for name in _order(tuple(runs), number):
            with no_garbage_collection():
                times[name] = statistics.median(_time_step(runs[name], clock) for _ in range(steps))
        yield times


def _refuse_emulated(name: str, run: Run) -> None:
    emulated: Sequence[str] = getattr(run, "emulated", ())
    if emulated:
        raise MeasurementError(
            f'step time: "{name}" uses {", ".join(emulated)}, which this device emulates, and emulation says nothing '
            "about speed; measure its fidelity here, and its speed on a device that has the format"
        )


def _time_step(run: Run, clock: Clock) -> float:
    if not isinstance(run, Phased):
        return clock(run)[1]
    run.prepare()
    result, seconds = clock(run.advance)
    run.settle(result)
    return seconds


def _order(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return the order of round `number`: every second one reverses the one before, then the start moves on."""
    start = number // 2 % len(names)
    turned = names[start:] + names[:start]
    return turned[::-1] if number % 2 else turned


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector from running in one run's steps what all runs left behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _collect(
    runs: Mapping[str, Run], rounds: Iterator[Mapping[str, float]] | Sequence[Mapping[str, float]]
) -> Mapping[str, tuple[float, ...]]:
    columns = list(rounds)
    return {name: tuple(times[name] for times in columns) for name in runs}


def _widest(times: Mapping[str, tuple[float, ...]], reference: str) -> float:
    ratios = (speedup(times[reference], times[name]) for name in times if name != reference)
    return max((ratio.half_width for ratio in ratios), default=0.0)


def _rank_of_bound(count: int) -> int:
    """Return the largest r for which [r-th smallest, r-th largest] covers the median with 95 %; 0 if none does."""
    tail = (1 - CONFIDENCE) / 2
    return sum(1 for below in range(count) if float(scipy.special.bdtr(below, count, 0.5)) <= tail)


def _at_least_one(what: str, count: int) -> int:
    if count < 1:
        raise MeasurementError(f"step time: {what} is {count}; it must be at least 1")
    return count
