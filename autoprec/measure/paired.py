"""Times of one computation in several formats: interleaved repetitions in one process, bounded in time."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from autoprec.measure.step_time import Clock

FP32 = "fp32"
Now: TypeAlias = Callable[[], float]

# A shorter block is not worth its clock: calls are repeated until they fill it.
_BLOCK_S, _MOST_CALLS = 1e-3, 16
_BACKWARD_ROUNDS = 25
_SHORTEST_S = 1e-9  # what a clock that did not move is taken for


class Block(Protocol):
    """Calls that are timed together."""

    def forward(self) -> object:
        """Run every call."""

    def prepare_backward(self) -> object:
        """Do what the backward pass of a step would not do."""

    def backward(self) -> object:
        """Run the backward passes of what `forward` computed."""


MakeBlock: TypeAlias = Callable[[int], Block]
"""From a number of calls to a block of so many, ready to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long op times may take: all together, and one signature in all its formats.

    A format whose first call takes over `slow_s` and over `slow_ratio` times the FP32 call is not called again.
    *Units*: seconds.
    """

    total_s: float = 60.0
    signature_s: float = 0.4
    min_rounds: int = 3
    max_rounds: int = 25
    slow_ratio: float = 4.0
    slow_s: float = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call, forward and backward, from `num_rounds` rounds.

    `spread` is half the distance of the quartiles of the sum over its median. With `is_bound` the call takes at least
    that long: it was stopped after one. Where the call cannot run, `reason` says why and the times are infinite.
    """

    forward_s: float
    backward_s: float
    spread: float = 0.0
    num_rounds: int = 1
    is_bound: bool = False
    reason: str = ""

    @property
    def total_s(self) -> float:
        """Return forward and backward together."""
        return self.forward_s + self.backward_s


def paired_times(
    makers: Mapping[str, MakeBlock],
    *,
    clock: Clock,
    allowance_s: float,
    limits: Limits,
    backward_call_s: float = 0.0,
    now: Now = time.perf_counter,
) -> Mapping[str, Timing]:
    """Return the timing of each format in `makers`, of which the first, FP32, is what the others are paired with.

    The time of a low format is the FP32 median times the median ratio within rounds, so that what disturbs the machine
    for longer than a round hits both alike. After the first calls, rounds end when `allowance_s` is spent, but
    `limits.min_rounds` are always taken. `backward_call_s` is what starting a backward pass takes: it is taken off, as
    a step does it once for all its calls.
    """
    names = iter(makers)
    base_name = next(names)
    base = _first_call(makers[base_name], clock)  # pays for caches and kernels
    if base.reason:
        return {base_name: base}
    base = _once(makers[base_name], 1, clock)
    result = {base_name: base}
    for name in names:
        result[name] = _first_call(makers[name], clock, slower_than=base, limits=limits)
    alive = [name for name, timing in result.items() if not timing.reason and not timing.is_bound]
    count = _num_calls(base.total_s - backward_call_s)
    if count > 1:  # a first call of its kind takes longer than those of a block
        count = _num_calls(_once(makers[base_name], count, clock, backward_call_s).total_s)
    rounds: list[Mapping[str, Timing]] = []
    ends = now() + allowance_s
    while len(rounds) < limits.max_rounds and (len(rounds) < limits.min_rounds or now() < ends):
        order = alive if len(rounds) % 2 == 0 else alive[::-1]
        rounds.append({name: _once(makers[name], count, clock, backward_call_s) for name in order})
    return {**result, **_summary(rounds, alive)}


def _num_calls(seconds: float) -> int:
    """Return how many calls of `seconds` each fill a block."""
    return max(1, min(_MOST_CALLS, math.ceil(_BLOCK_S / max(seconds, _SHORTEST_S))))


def backward_call(make: MakeBlock, clock: Clock) -> float:
    """Return the seconds that starting a backward pass takes, from blocks of one and of many of a trivial call.

    The medians of both are on a line over the number of calls; this is where it meets zero calls.
    """
    few, many = 1, _MOST_CALLS
    times: dict[int, list[float]] = {few: [], many: []}
    for _ in range(_BACKWARD_ROUNDS):
        for count, seconds in times.items():
            block = make(count)
            block.forward()
            block.prepare_backward()
            seconds.append(clock(block.backward)[1])
    one, all_of_them = statistics.median(times[few]), statistics.median(times[many])
    return max(0.0, (many * one - few * all_of_them) / (many - few))


def _summary(rounds: Sequence[Mapping[str, Timing]], names: Sequence[str]) -> dict[str, Timing]:
    """Return the timings of `names` over all rounds, the first of them being what the others are paired with."""
    base = [each[names[0]].total_s for each in rounds]
    found = {}
    for name in names:
        forward = statistics.median(each[name].forward_s for each in rounds)
        backward = statistics.median(each[name].backward_s for each in rounds)
        totals = [each[name].total_s for each in rounds]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(totals, base, strict=True))
        factor = statistics.median(base) * ratio / max(forward + backward, _SHORTEST_S)
        found[name] = Timing(
            forward_s=forward * factor,
            backward_s=backward * factor,
            spread=_spread(totals),
            num_rounds=len(rounds),
        )
    return found


def _first_call(
    make: MakeBlock, clock: Clock, *, slower_than: Timing | None = None, limits: Limits | None = None
) -> Timing:
    """Return the timing of one call, or why it cannot run; its backward is left out where the forward is too slow."""
    try:
        block = make(1)
        _, forward = clock(block.forward)
        if slower_than and limits and _is_slow(forward, slower_than.forward_s, limits):
            return Timing(forward_s=forward, backward_s=slower_than.backward_s, is_bound=True)
        block.prepare_backward()
        _, backward = clock(block.backward)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Timing(forward_s=math.inf, backward_s=math.inf, reason=reason)
    slow = slower_than and limits and _is_slow(forward + backward, slower_than.total_s, limits)
    return Timing(forward_s=forward, backward_s=backward, is_bound=bool(slow))


def _is_slow(seconds: float, fp32_s: float, limits: Limits) -> bool:
    return seconds > max(limits.slow_s, limits.slow_ratio * fp32_s)


def _once(make: MakeBlock, count: int, clock: Clock, backward_call_s: float = 0.0) -> Timing:
    block = make(count)
    _, forward = clock(block.forward)
    block.prepare_backward()
    _, backward = clock(block.backward)
    return Timing(forward_s=max(forward, _SHORTEST_S) / count, backward_s=max(backward - backward_call_s, 0.0) / count)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle
