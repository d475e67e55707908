"""Op times: every signature of a recorded step, in FP32 and each low format, measured once on the device.

Inputs are those of a replay of the step, each call measured right before it runs in it, so that kernels whose time
depends on the data see real data, and no more memory is held than one step needs and one call beside it. Gradients of
results are random numbers. Forward and backward pass through autograd in every format alike.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoprec.capture import Recording, Replay
from autoprec.graph.opgraph import OpNode
from autoprec.measure.call_facts import CallFacts, facts_of
from autoprec.measure.cast_time import DIRECTIONS, LAYOUTS, CastTime, CastTimes, key, measure_casts, sizes_up_to
from autoprec.measure.op_call import Arguments, IsolatedCall, Kept, free_evicting, isolated
from autoprec.measure.paired import FP32, Limits, MakeBlock, Timing, backward_call, paired_times
from autoprec.measure.step_time import Clock, clock_of
from autoprec.measure.time_cache import OpTime, StoredTimes, load_times, save_times
from autoprec.runtime.device import DeviceInfo
from autoprec.runtime.dtypes import torch_dtype

_CAST_SHARE = 0.25  # of the whole budget
_LARGEST_LEARNED = 32 * 2**20 - 2**14


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """The times of one recorded step, and how they were come by.

    `times` maps signature and format to what was measured; a signature that the budget did not reach has no entry and
    is counted in `num_unmeasured`. `measured_s` is the wall time of measuring, `num_from_cache` counts signatures of
    which every format came from disk.
    """

    facts: tuple[CallFacts, ...]
    formats: tuple[str, ...]
    times: Mapping[str, Mapping[str, OpTime]]
    casts: CastTimes
    measured_s: float
    num_from_cache: int
    num_unmeasured: int
    notes: tuple[str, ...] = ()

    @property
    def num_signatures(self) -> int:
        """Return how many different calls the step makes."""
        return len(signatures(self.facts))


def signatures(facts: Sequence[CallFacts]) -> dict[str, str]:
    """Return the signatures of a step, each with the first node that has it."""
    found: dict[str, str] = {}
    for each in facts:
        if each.signature is not None:
            found.setdefault(each.signature, each.name)
    return found


def measure_op_times(
    recording: Recording, formats: Sequence[str], device: DeviceInfo, *, limits: Limits | None = None
) -> OpTimes:
    """Return the times of `recording` in FP32 and the low `formats`, from disk where they were measured before.

    Signatures that the budget does not reach are left out, the later ones of the step first.
    """
    started = time.perf_counter()
    stored, notes = load_times(device)
    facts = facts_of(recording)
    firsts = signatures(facts)
    with _undisturbed(recording.device):
        fresh, num_wanted = _measured(recording, formats, facts, stored, limits or Limits(), started)
    if fresh.ops or fresh.casts:
        notes = (*notes, *save_times(device, fresh))
    known = stored.merged(fresh)
    return OpTimes(
        facts=facts,
        formats=tuple(formats),
        times={sig: known.ops[sig] for sig in firsts if sig in known.ops},
        casts=CastTimes(points=known.casts),
        measured_s=time.perf_counter() - started if fresh.ops or fresh.casts else 0.0,
        num_from_cache=len(firsts) - num_wanted,
        num_unmeasured=sum(sig not in known.ops for sig in firsts),
        notes=notes,
    )


def _measured(
    recording: Recording,
    formats: Sequence[str],
    facts: Sequence[CallFacts],
    stored: StoredTimes,
    limits: Limits,
    started: float,
) -> tuple[StoredTimes, int]:
    """Return what `stored` lacked, and how many signatures that were."""
    names = (FP32, *formats)
    wanted = {
        node: signature
        for signature, node in signatures(facts).items()
        if any(name not in stored.ops.get(signature, {}) for name in names)
    }
    sizes = _missing_sizes(facts, formats, stored)
    fresh = replace(stored, ops={}, casts={})
    if not wanted and not sizes:
        return fresh, 0
    bench = _bench(recording.device, limits, started)
    casts = _cast_points(sizes, formats, bench)
    timing = _Timing(recording, wanted, formats, bench)
    if wanted:
        timing.loss()
    free_evicting()
    ops = {sig: _fitted(found, stored.ops.get(sig, {})) for sig, found in timing.found.items()}
    return replace(fresh, ops=ops, casts=casts), len(wanted)


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What measures, for how long, and what starting a backward pass takes on it."""

    device: str
    clock: Clock
    limits: Limits
    ends: float
    backward_call_s: float

    def times(self, makers: Mapping[str, MakeBlock], allowance_s: float) -> Mapping[str, Timing]:
        """Return the timing of each format."""
        return paired_times(
            makers,
            clock=self.clock,
            allowance_s=allowance_s,
            limits=self.limits,
            backward_call_s=self.backward_call_s,
        )


def _bench(device: str, limits: Limits, started: float) -> _Bench:
    clock = op_clock(device)
    _keep_freed_memory(device)
    scalar = torch.zeros(1, device=device, requires_grad=True)
    with torch.enable_grad():
        trivial = IsolatedCall(lambda each: each.view(1), ((scalar,), {}))
    call_s = backward_call(trivial.block, clock)
    return _Bench(device=device, clock=clock, limits=limits, ends=started + limits.total_s, backward_call_s=call_s)


def op_clock(device: str) -> Clock:
    """Return the clock for calls on `device`: with one CPU thread that of the process, which others do not disturb."""
    is_alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return _process_time if is_alone else clock_of(device)


def _process_time(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


def _keep_freed_memory(device: str) -> None:
    """Have glibc keep what is freed, as it does in a long run, and not ask for it anew page by page in each call.

    It learns from the largest block that was freed, up to 32 MiB. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    if torch.device(device).type == "cpu":
        torch.empty(_LARGEST_LEARNED, dtype=torch.uint8)


class _Timing(Replay):
    """One replay in which the first call of each wanted signature is measured in every format before it runs."""

    def __init__(self, recording: Recording, wanted: Mapping[str, str], formats: Sequence[str], bench: _Bench) -> None:
        super().__init__(recording)
        self.found: dict[str, dict[str, OpTime]] = {}
        self._graph, self._wanted, self._formats = recording.op_graph, wanted, formats
        self._bench = bench

    def run_node(self, n: fx.Node) -> Any:
        """Return what the node computes."""
        if n.name in self._wanted:
            bench = self._bench
            left = bench.ends - time.perf_counter()
            if left > 0:
                share = left / (len(self._wanted) - len(self.found))
                with untouched_random(bench.device):
                    self.found[self._wanted[n.name]] = self._measure(n, min(share, bench.limits.signature_s))
        return super().run_node(n)

    def _measure(self, n: fx.Node, allowance_s: float) -> dict[str, OpTime]:
        node, arguments = self._graph[n.name], self.fetch_args_kwargs_from_env(n)
        calls, failed = _calls(n.target, node, arguments, self._formats)
        makers = {name: call.block for name, call in calls.items()}
        times = dict(self._bench.times(makers, allowance_s))
        if times[FP32].reason:  # what does not even run as recorded tells nothing of a format
            reason = f"it cannot run by itself: {times[FP32].reason}"
            failed = dict.fromkeys(self._formats, reason)
            times, calls = {FP32: Timing(forward_s=0.0, backward_s=0.0, reason=reason)}, {FP32: calls[FP32]}
        found = {name: OpTime(timing=times[name], kept=_kept(calls[name], times[name])) for name in times}
        return found | {name: OpTime(timing=_never(reason), kept=Kept()) for name, reason in failed.items()}


def _calls(
    func: Any, node: OpNode, arguments: Arguments, formats: Collection[str]
) -> tuple[dict[str, IsolatedCall], dict[str, str]]:
    """Return the call in FP32 and each format, and why it cannot be cast to some."""
    is_cast = node.site is not None and node.is_castable
    calls = {FP32: isolated(func, node, arguments, torch.float32 if is_cast else None)}
    failed = {}
    for name in formats:
        try:
            calls[name] = isolated(func, node, arguments, torch_dtype(name))
        except (RuntimeError, TypeError, ValueError) as error:
            failed[name] = str(error).partition("\n")[0]
    return calls, failed


def _kept(call: IsolatedCall, timing: Timing) -> Kept:
    return Kept() if timing.reason else call.kept()


def _never(reason: str) -> Timing:
    return Timing(forward_s=math.inf, backward_s=math.inf, reason=reason)


def _fitted(found: Mapping[str, OpTime], stored: Mapping[str, OpTime]) -> Mapping[str, OpTime]:
    """Return the formats that are new, on the scale of the FP32 time that is stored already."""
    if FP32 not in stored or FP32 not in found:
        return found
    measured_s = found[FP32].timing.total_s
    scale = stored[FP32].timing.total_s / measured_s if measured_s else 1.0
    return {name: _scaled(each, scale) for name, each in found.items() if name not in stored}


def _scaled(each: OpTime, scale: float) -> OpTime:
    timing = each.timing
    scaled = replace(timing, forward_s=timing.forward_s * scale, backward_s=timing.backward_s * scale)
    return OpTime(timing=scaled, kept=each.kept)


def _missing_sizes(facts: Sequence[CallFacts], formats: Sequence[str], stored: StoredTimes) -> tuple[int, ...]:
    """Return the sizes of casts to measure for a step; none if all formats have them."""
    numel = max((each.numel for call in facts for each in call.inputs if each.is_floating), default=0)
    sizes = sizes_up_to(numel)
    keys = [key(*each) for each in itertools.product(formats, DIRECTIONS, LAYOUTS)]
    return sizes if any(len(stored.casts.get(name, ())) < len(sizes) for name in keys) else ()


def _cast_points(sizes: Sequence[int], formats: Sequence[str], bench: _Bench) -> Mapping[str, tuple[CastTime, ...]]:
    share = bench.limits.total_s * _CAST_SHARE / max(1, len(sizes) * len(LAYOUTS) * len(formats))
    return measure_casts(
        formats,
        sizes,
        device=bench.device,
        clock=bench.clock,
        limits=bench.limits,
        allowance_s=min(share, bench.limits.signature_s / 2),
        backward_call_s=bench.backward_call_s,
    )


@contextmanager
def _undisturbed(device: str) -> Iterator[None]:
    """Measure without the garbage collector, and put the caller's random states back afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with untouched_random(device):
            yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def untouched_random(device: str) -> Iterator[None]:
    """Put the random states back afterwards: the replay draws what the step drew."""
    place = torch.device(device)
    cuda = [place.index or 0] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        yield
