"""Views: every number, label, unit and order that a report shows, computed from a record alone."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from autoprec.records.run import FidelityRecord, Interval, RunRecord, TrialRecord

_ENDED_EARLY = {"pruned": "ended early", "failed": "failed"}
_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One line of a table of trials. `is_written` marks the policy that was written."""

    name: str
    step: str
    speedup: str
    fidelity: str
    memory: str
    note: str
    is_written: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRow:
    """Sites that the written policy keeps in FP32."""

    sites: str
    count: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """What an engineer needs to act on a run, in reading order."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    baselines: tuple[TrialRow, ...]
    best: tuple[TrialRow, ...]
    kept_title: str
    kept: tuple[KeptRow, ...]
    proof: tuple[tuple[str, str], ...]
    usage: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def run_view(record: RunRecord) -> RunView:
    """Return the view of a `tune` or `bench` run."""
    others = sorted((t for t in record.trials if t.kind != "baseline" and t.state != "duplicate"), key=_fastest_first)
    return RunView(
        headline=headline(record),
        facts=_facts(record),
        baselines=tuple(_trial_row(trial, record) for trial in record.baselines),
        best=tuple(_trial_row(trial, record) for trial in others[:5]),
        kept_title=_kept_title(record),
        kept=_kept(record),
        proof=_proof(record),
        usage=_usage(record),
        files=tuple(
            (label, text)
            for label, text in (("policy", record.policy_file), ("record", record.record_file), ("study", record.study))
            if text is not None
        ),
    )


def headline(record: RunRecord) -> str:
    """Return the outcome of a run in one sentence."""
    chosen, count = record.chosen, len(record.trials)
    if chosen is None:
        return f"{record.workload}: {count} policies measured on {record.device.name}"
    state = "" if chosen.verified else ", not verified: the run was interrupted" * record.interrupted
    if record.verdict == "improved":
        return (
            f"{chosen.name} trains {_times(chosen.speedup_vs_fp32)} as fast as fp32 and "
            f"{_times(chosen.speedup_vs_best_baseline)} as fast as {chosen.best_baseline}, the best baseline{state}"
        )
    if record.verdict == "tie":
        return f"nothing is faster than {chosen.best_baseline} beyond the spread; the policy is {chosen.name}{state}"
    return f"nothing beats {chosen.best_baseline}, the best baseline; the policy is {chosen.name}{state}"


def trial_line(trial: TrialRecord) -> str:
    """Return what a finished trial gave, in one line."""
    parts = [
        f"trial {trial.number} {trial.name}: {trial.state}",
        "" if trial.speedup is None else f"{_times(trial.speedup)} fp32",
        "" if trial.fidelity is None else _fidelity(trial.fidelity),
        trial.reason,
    ]
    return ", ".join(filter(None, parts))


def best_line(trial: TrialRecord) -> str:
    """Return the best trial so far in a few words."""
    return f"best: {trial.name} {_times(trial.speedup)} fp32"


def result_json(record: RunRecord) -> dict[str, Any]:
    """Return what `autoprec tune --json` prints."""
    chosen = record.chosen
    trial = next((each for each in record.trials if chosen is not None and each.number == chosen.trial), None)
    versus = None if chosen is None else chosen.speedup_vs_best_baseline
    return {
        "schema_version": 1,
        "policy": record.policy_file,
        "record": record.record_file,
        "name": None if chosen is None else chosen.name,
        "verdict": record.verdict,
        "verified": chosen is not None and chosen.verified,
        "interrupted": record.interrupted,
        "speedup_vs_fp32": None if chosen is None else _value(chosen.speedup_vs_fp32),
        "speedup_vs_best_baseline": _value(versus),
        "best_baseline": None if chosen is None else chosen.best_baseline,
        "spread": None if versus is None else _finite(versus.spread),
        "fidelity": _fidelity_json(_proven_fidelity(record, trial)),
        "memory_bytes": None if trial is None or trial.memory is None else trial.memory.total_bytes,
        "baselines": [trial_json(each) for each in record.baselines],
        "num_trials": len(record.trials),
        "wall_s": record.wall_s,
    }


def bench_json(record: RunRecord) -> dict[str, Any]:
    """Return what `autoprec bench --json` prints."""
    return {
        "schema_version": 1,
        "workload": record.workload,
        "record": record.record_file,
        "policy": next(trial_json(each) for each in record.trials if each.kind == "policy"),
        "baselines": [trial_json(each) for each in record.baselines],
        "wall_s": record.wall_s,
    }


def trial_json(trial: TrialRecord) -> dict[str, Any]:
    """Return one trial as `--json` prints it."""
    return {
        "name": trial.name,
        "state": trial.state,
        "reason": trial.reason,
        "step_s": trial.step_s,
        "speedup": _value(trial.speedup),
        "interval": None if trial.speedup is None else [_finite(trial.speedup.low), _finite(trial.speedup.high)],
        "fidelity": _fidelity_json(trial.fidelity),
        "memory_bytes": None if trial.memory is None else trial.memory.total_bytes,
        "num_skipped": trial.num_skipped,
    }


def _proven_fidelity(record: RunRecord, trial: TrialRecord | None) -> FidelityRecord | None:
    """Return the fidelity that counts for the written policy: the verification's if there is one."""
    for verification in record.verification:
        if record.chosen is not None and verification.name == record.chosen.name and verification.passed:
            return verification.fidelity or (None if trial is None else trial.fidelity)
    return None if trial is None else trial.fidelity


def _fidelity_json(fidelity: FidelityRecord | None) -> dict[str, Any] | None:
    if fidelity is None:
        return None
    fractions = ("steps_lost_frac", "upper_frac", "margin", "power_frac", "chaos_frac")
    return {
        "verdict": fidelity.verdict,
        **{key: _finite(getattr(fidelity, key)) for key in fractions},
        "horizon": fidelity.horizon,
        "reason": fidelity.reason,
    }


def _facts(record: RunRecord) -> tuple[tuple[str, str], ...]:
    states = [trial.state for trial in record.trials if trial.state != "duplicate"]
    measured = f"{_count(len(states), 'policy', 'policies')} in {_seconds(record.wall_s)}"
    details = [f"{states.count(state)} {word}" for state, word in _ENDED_EARLY.items() if state in states]
    graph = record.graph
    return (
        ("workload", f"{record.workload}: {graph.num_sites} sites, {graph.num_nodes} nodes, graph {graph.fingerprint}"),
        ("device", f"{record.device.name} ({record.device.kind}), torch {record.versions.get('torch', '?')}"),
        ("measured", f"{measured}, {record.horizon} steps each" + (f"; {', '.join(details)}" if details else "")),
    )


def _trial_row(trial: TrialRecord, record: RunRecord) -> TrialRow:
    is_written = record.chosen is not None and record.chosen.trial == trial.number
    return TrialRow(
        name=trial.name,
        step=_step(trial, record),
        speedup="-" if trial.speedup is None else _with_interval(trial.speedup),
        fidelity="-" if trial.fidelity is None else _fidelity(trial.fidelity),
        memory="-" if trial.memory is None else _bytes(trial.memory.total_bytes),
        note=" ".join(filter(None, ["written" * is_written, trial.reason, _skipped(trial)])),
        is_written=is_written,
    )


def _step(trial: TrialRecord, record: RunRecord) -> str:
    """Return a trial's step time at the pace the machine had over the whole run, so that steps and ratios agree.

    A shared machine is slower in some minutes than in others; the ratio to FP32 within its rounds is what was measured.
    """
    paces = [each.reference_step_s for each in record.trials if each.reference_step_s is not None]
    if trial.speedup is None or not paces:
        return "-"
    return _seconds(statistics.median(paces) / trial.speedup.value)


def _kept_title(record: RunRecord) -> str:
    chosen = record.chosen
    if chosen is None or chosen.num_sites == 0:
        return ""
    low = f"{chosen.low_sites} of {chosen.num_sites} sites are assigned to a low format"
    return f"{low}; kept in fp32:" if chosen.kept else low


def _kept(record: RunRecord) -> tuple[KeptRow, ...]:
    rows = () if record.chosen is None else record.chosen.kept
    return tuple(KeptRow(sites=row.sites, count=_count(row.num_sites, "site"), why=row.why) for row in rows)


def _proof(record: RunRecord) -> tuple[tuple[str, str], ...]:
    lines = []
    for check in record.verification:
        outcome = "passed" if check.passed else "failed"
        text = f"{outcome} with seed {check.seed} over {check.horizon} steps: {check.reason}"
        if check.evaluate_candidate is not None and check.evaluate_reference is not None:
            text += f"; evaluate {check.evaluate_candidate:.4g}, fp32 {check.evaluate_reference:.4g}"
        if check.versus_baseline is not None:
            text += f"; {_with_interval(check.versus_baseline)} the best baseline, timed side by side"
        lines.append((f"verification of {check.name}", text))
    trial = next((t for t in record.trials if record.chosen is not None and t.number == record.chosen.trial), None)
    fidelity = _proven_fidelity(record, trial)
    if record.chosen is not None and record.chosen.name == "fp32":
        lines.append(("fidelity", "strict fp32 is the reference itself"))
    elif fidelity is not None and record.chosen is not None:
        lines.append(("fidelity", fidelity.reason or fidelity.verdict))
    if trial is not None and trial.memory is not None:
        lines.append(("memory", _memory_change(record, trial)))
    return tuple(lines)


def _memory_change(record: RunRecord, trial: TrialRecord) -> str:
    assert trial.memory is not None
    text = f"{_bytes(trial.memory.total_bytes)} for one copy"
    fp32 = next((each.memory for each in record.baselines if each.name == "fp32"), None)
    if fp32 is None or fp32.total_bytes == 0:
        return text
    return f"{text}, {trial.memory.total_bytes / fp32.total_bytes:.2f} times that of fp32"


def _usage(record: RunRecord) -> tuple[str, ...]:
    if record.policy_file is None:
        return ()
    return (
        "import autoprec",
        f'precision = autoprec.apply(model, "{record.policy_file}")  # before the optimizer is built',
        f"with precision.loss(): loss = loss_fn(model(x), y)  # then {_backward(record)}",
    )


def _backward(record: RunRecord) -> str:
    """Return what follows the loss: the policy says itself whether it scales the loss."""
    policy = "" if record.chosen is None else record.chosen.policy
    is_scaled = "\nloss_scale: none\n" not in policy
    return "precision.scaler, as any torch.amp.GradScaler" if is_scaled else "loss.backward()"


def _fastest_first(trial: TrialRecord) -> tuple[bool, float, int]:
    return (not trial.is_faithful, -trial.speedup.value if trial.speedup else 0.0, trial.number)


def _skipped(trial: TrialRecord) -> str:
    return f"{_count(trial.num_skipped, 'step')} skipped by the loss scale" if trial.num_skipped else ""


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _value(interval: Interval | None) -> float | None:
    return None if interval is None else interval.value


def _finite(value: float) -> float | None:
    """Return None for what JSON has no word for."""
    return value if math.isfinite(value) else None


def _times(interval: Interval | None) -> str:
    return "?" if interval is None else f"{interval.value:.2f}x"


def _with_interval(interval: Interval) -> str:
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def _fidelity(fidelity: FidelityRecord) -> str:
    if not math.isfinite(fidelity.steps_lost_frac):
        return fidelity.verdict
    return f"{fidelity.verdict}, {_percent(fidelity.steps_lost_frac)} lost"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _bytes(number: int) -> str:
    for unit, size in _BYTES:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"
