"""Baselines and a given policy side by side: each measured beside FP32, then all timed in the same rounds."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from autoprec.errors import PolicyError
from autoprec.graph.float8 import float8_faults
from autoprec.measure import interleave, speedup
from autoprec.policy import Policy, diff, resolve
from autoprec.records.run import TrialRecord
from autoprec.search.objective import Objective, Protocol, interval_of
from autoprec.search.observer import Observer
from autoprec.search.study import Asked
from autoprec.search.subject import Subject

_ROUNDS = 16


def measure_side_by_side(
    objective: Objective, baselines: Mapping[str, Policy], policy: Policy, observer: Observer
) -> tuple[TrialRecord, ...]:
    """Return a trial for each of `baselines`, of which `fp32` is the bar, and one for `policy`.

    A policy that is one of the baselines is measured as that one alone. Fidelity and memory come from a run beside
    FP32; the times of those that are not far too slow, from the same rounds.
    """
    given = policy.name if policy.name not in baselines else f"{policy.name}-file"
    same = next((name for name, each in baselines.items() if not diff(each, policy)), None)
    policies = {**baselines, **({} if same else {given: policy})}
    records = []
    for number, (name, each) in enumerate(policies.items()):
        observer.trial_begins(name, number)
        asked = Asked(number=number, kind="policy" if name == given else "baseline", name=name, choice={})
        record = objective.measure(asked, each, name, lambda done, ratio: _watch(objective, observer, done, ratio))
        observer.trial_ends(record, None)
        records.append(record)
    objective.close()
    observer.stage("same rounds")
    timed = _same_rounds(
        objective.protocol,
        {r.name: policies[r.name] for r in records if r.state == "complete" and not r.emulated},
        observer,
    )
    trials = [_with_times(record, timed) for record in records]
    if same:  # measured once, shown as both
        twin = next(trial for trial in trials if trial.name == same)
        trials.append(replace(twin, number=len(trials), kind="policy", name=given, reason=f"same policy as {same}"))
    return tuple(trials)


def check_fits(policy: Policy, subject: Subject, file: str | None = None, lines: Sequence[int] = ()) -> None:
    """Return if the device runs or emulates `policy`, each of its rules wins a site, and FP8 kernels take the shapes.

    Rules stand on `lines` of `file`; a preset has none, and names ops that this workload may lack.

    Raises: `FormatError`, `DeviceError` or `PolicyError`.
    """
    subject.device.require(policy)
    resolved = resolve(policy, subject.op_graph.sites())
    if file is not None:
        resolved.check_alive(file, lines)
    faults = float8_faults(resolved, subject.op_graph)
    if faults:
        raise PolicyError(
            f'policy "{policy.name}": {"; ".join(faults)}; give these sites another format by a rule above'
        )


def _watch(objective: Objective, observer: Observer, done: int, ratio: float) -> bool:
    observer.round_ends((done + 1) / objective.protocol.num_rounds, ratio)
    return False


def _same_rounds(
    protocol: Protocol, policies: Mapping[str, Policy], observer: Observer
) -> Mapping[str, tuple[float, ...]]:
    """Return step times round by round; nothing where all runs at once do not fit into the device's memory."""
    if "fp32" not in policies:
        return {}
    try:
        with ExitStack() as stack:
            runs = {name: stack.enter_context(protocol.train(policy)) for name, policy in policies.items()}
            return interleave(runs, rounds=_ROUNDS, steps_per_round=protocol.steps_per_round, device=protocol.device)
    except torch.OutOfMemoryError:
        observer.note("all runs at once do not fit into memory: speed-ups are from rounds with fp32 alone")
        return {}


def _with_times(record: TrialRecord, timed: Mapping[str, tuple[float, ...]]) -> TrialRecord:
    if record.name not in timed:
        return record
    ours, fp32 = timed[record.name], timed["fp32"]
    ratio = speedup(fp32, ours)
    return replace(
        record,
        step_s=sorted(ours)[len(ours) // 2],
        reference_step_s=sorted(fp32)[len(fp32) // 2],
        speedup=interval_of(ratio),
        step_times_s=ours,
        reference_step_times_s=fp32,
    )
