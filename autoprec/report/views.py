"""Views: every number, label, unit and order that a report shows, computed from a record alone."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoprec.records.planner import PlannerRecord
from autoprec.records.quantities import (
    bytes_text,
    count_text,
    interval_text,
    percent_text,
    seconds_text,
    times_text,
)
from autoprec.records.run import ChosenRecord, FidelityRecord, RunRecord, TrialRecord
from autoprec.search.decide import faithful_baselines, speedup_of

_ENDED_EARLY = {"pruned": "ended early", "failed": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One line of a table of trials, and a note. `is_written` marks the policy that was written."""

    name: str
    speedup: str
    step: str
    steps_lost: str
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
    baselines_title: str
    baselines: tuple[TrialRow, ...]
    best_title: str
    best: tuple[TrialRow, ...]
    kept_title: str
    kept: tuple[KeptRow, ...]
    proof: tuple[tuple[str, str], ...]
    usage: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def run_view(record: RunRecord) -> RunView:
    """Return the view of a `tune` or `bench` run."""
    others = sorted((trial for trial in measured_trials(record) if trial.kind != "baseline"), key=_fastest_first)[:5]
    return RunView(
        headline=headline(record),
        facts=_facts(record),
        baselines_title=_baselines_title(record),
        baselines=tuple(_trial_row(trial, record) for trial in record.baselines),
        best_title=_best_title(record, others),
        best=tuple(_trial_row(trial, record) for trial in others),
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
    chosen = record.chosen
    if chosen is None:
        return f"{record.workload}: {_num_measured(record)} measured on {record.device.name}"
    state = "" if chosen.verified else ", not verified: the run was interrupted" * record.interrupted
    rival = _rival(record, chosen)
    if record.verdict == "improved":
        return (
            f"{chosen.name} trains {times_text(chosen.speedup_vs_fp32)} as fast as fp32 and "
            f"{times_text(chosen.speedup_vs_best_baseline)} as fast as {chosen.best_baseline}, the best baseline"
            f"{f' (that of {rival.name} is within its spread)' if rival else ''}{state}"
        )
    if rival is not None:
        written = f"{'the simpler ' if chosen.trial < rival.number else ''}{chosen.name}"
        return f"{chosen.name} cannot be told from {rival.name} beyond the spread; {written} is written{state}"
    if record.verdict == "tie":
        return f"nothing is faster than {chosen.best_baseline} beyond the spread; the policy is {chosen.name}{state}"
    return f"nothing beats {chosen.best_baseline}, the best baseline; the policy is {chosen.name}{state}"


def _rival(record: RunRecord, chosen: ChosenRecord) -> TrialRecord | None:
    """Return the baseline that is nominally faster than the best one, but not beyond its spread; mostly None."""
    failed = {check.name for check in record.verification if not check.passed}
    ranked = faithful_baselines([trial for trial in record.trials if trial.name not in failed])
    return ranked[0] if ranked and ranked[0].name not in (chosen.best_baseline, chosen.name) else None


def trial_line(trial: TrialRecord) -> str:
    """Return what a finished trial gave, in one line."""
    parts = [
        f"trial {trial.number} {trial.name}: {trial.state}",
        _speedup_text(trial),
        "" if trial.fidelity is None else _fidelity(trial.fidelity),
        trial.reason,
    ]
    return ", ".join(filter(None, parts))


def best_line(trial: TrialRecord) -> str:
    """Return the best trial so far in a few words."""
    return f"best: {trial.name} {times_text(speedup_of(trial))} fp32"


def proven_fidelity(record: RunRecord, trial: TrialRecord | None) -> FidelityRecord | None:
    """Return the fidelity that counts for the written policy: the verification's if there is one."""
    for verification in record.verification:
        if record.chosen is not None and verification.name == record.chosen.name and verification.passed:
            return verification.fidelity or (None if trial is None else trial.fidelity)
    return None if trial is None else trial.fidelity


def _facts(record: RunRecord) -> tuple[tuple[str, str], ...]:
    states = [trial.state for trial in measured_trials(record)]
    measured = f"{_num_measured(record)} in {seconds_text(record.wall_s)}"
    details = [f"{states.count(state)} {word}" for state, word in _ENDED_EARLY.items() if state in states]
    graph = record.graph
    return (
        ("workload", f"{record.workload}: {graph.num_sites} sites, {graph.num_nodes} nodes, graph {graph.fingerprint}"),
        ("device", f"{record.device.name} ({record.device.kind}), torch {record.versions.get('torch', '?')}"),
        ("measured", f"{measured}, {record.horizon} steps each" + (f"; {', '.join(details)}" if details else "")),
        *_planned(record.planner),
    )


def _planned(planner: PlannerRecord | None) -> Iterator[tuple[str, str]]:
    """Yield what the search began with: the predicted plans, and what was measured to make them."""
    if planner is None:
        return
    units = sum(each.num_measured for each in planner.errors.values())
    sources = f"times of {count_text(planner.num_signatures, 'op')} and errors of {count_text(units, 'group')}"
    if not planner.plans:
        yield "planned", f"nothing: by the {sources}, no site is faster low"
        return
    best = max(planner.plans, key=lambda plan: plan.saved_s)
    number = count_text(len(planner.plans), "plan")
    yield (
        "planned",
        f"{number} from the {sources}; the fastest saves {1e3 * best.saved_s:.3g} ms a step with "
        f"{best.num_low_sites} sites in {best.low}, predicted",
    )


def measured_trials(record: RunRecord) -> tuple[TrialRecord, ...]:
    """Return the trials that are policies of their own."""
    return tuple(trial for trial in record.trials if trial.state != "duplicate")


def _num_measured(record: RunRecord) -> str:
    return count_text(len(measured_trials(record)), "policy", "policies")


def _baselines_title(record: RunRecord) -> str:
    pace = _pace_s(record)
    if pace is None:
        return "Baselines"
    return f"Baselines (step: at the pace of fp32 = {seconds_text(pace)}; lost: steps of training)"


def _best_title(record: RunRecord, others: Sequence[TrialRecord]) -> str:
    if record.command == "bench":
        return "Policy"
    is_whole = all(trial.state == "complete" for trial in others)
    return "Fastest of the search" if is_whole else "Other policies measured"


def _trial_row(trial: TrialRecord, record: RunRecord) -> TrialRow:
    is_written = record.chosen is not None and record.chosen.trial == trial.number
    speedup, pace, fidelity = speedup_of(trial), _pace_s(record), trial.fidelity
    doubt = "" if fidelity is None or fidelity.passed else fidelity.verdict
    notes = ("written" * is_written, trial.reason if doubt in trial.reason else f"{doubt} {trial.reason}".strip())
    return TrialRow(
        name=trial.name,
        speedup="-" if speedup is None else interval_text(speedup),
        step="-" if speedup is None or pace is None else seconds_text(pace / speedup.value),
        steps_lost="-" if fidelity is None else _steps_lost(fidelity),
        memory="-" if trial.memory is None else bytes_text(trial.memory.total_bytes),
        note="; ".join(filter(None, [*notes, _skipped(trial)])),
        is_written=is_written,
    )


def _pace_s(record: RunRecord) -> float | None:
    """Return the FP32 step time over the whole run; all step times are shown at this pace, so that ratios agree.

    A shared machine is slower in some minutes than in others; the ratio to FP32 within its rounds is what was measured.
    """
    paces = [each.reference_step_s for each in record.trials if each.reference_step_s is not None]
    return statistics.median(paces) if paces else None


def _kept_title(record: RunRecord) -> str:
    """Return how many sites are in a low format, follow their inputs and stay FP32; they are all the sites."""
    chosen = record.chosen
    if chosen is None or chosen.num_sites == 0:
        return ""
    rest = chosen.num_sites - chosen.low_sites
    # Without a low format every site is FP32, and its rows are not listed. Globs of rows may overlap.
    kept = rest if chosen.low_sites == 0 else min(sum(row.num_sites for row in chosen.kept), rest)
    parts = [f"{chosen.low_sites} of {chosen.num_sites} sites are assigned to a low format"]
    parts += [f"{rest - kept} {'follows its' if rest - kept == 1 else 'follow their'} inputs"] * (rest > kept)
    parts += [f"{kept} kept in fp32"] * (kept > 0)
    return f"{', '.join(parts)}{':' * bool(chosen.kept)}"


def _kept(record: RunRecord) -> tuple[KeptRow, ...]:
    rows = () if record.chosen is None else record.chosen.kept
    return tuple(KeptRow(sites=row.sites, count=count_text(row.num_sites, "site"), why=row.why) for row in rows)


def _proof(record: RunRecord) -> tuple[tuple[str, str], ...]:
    lines = []
    for check in record.verification:
        outcome = "passed" if check.passed else "failed"
        text = f"{outcome} with seed {check.seed} over {check.horizon} steps: {check.reason}"
        if check.evaluate_candidate is not None and check.evaluate_reference is not None:
            text += f"; evaluate {check.evaluate_candidate:.4g}, fp32 {check.evaluate_reference:.4g}"
        if check.versus_baseline is not None:
            text += f"; {interval_text(check.versus_baseline)} the best baseline, timed side by side"
        lines.append((f"verification of {check.name}", text))
    trial = next((t for t in record.trials if record.chosen is not None and t.number == record.chosen.trial), None)
    fidelity = proven_fidelity(record, trial)
    if record.chosen is not None and record.chosen.name == "fp32":
        lines.append(("fidelity", "strict fp32 is the reference itself"))
    elif fidelity is not None and record.chosen is not None:
        lines.append(("fidelity", fidelity.reason or fidelity.verdict))
    if trial is not None and trial.memory is not None:
        lines.append(("memory", _memory_change(record, trial)))
    return tuple(lines)


def _memory_change(record: RunRecord, trial: TrialRecord) -> str:
    assert trial.memory is not None
    text = f"{bytes_text(trial.memory.total_bytes)} for one copy"
    fp32 = next((each.memory for each in record.baselines if each.name == "fp32"), None)
    if fp32 is None or fp32.total_bytes == 0:
        return text
    return f"{text}, {trial.memory.total_bytes / fp32.total_bytes:.2f} times that of fp32"


def _usage(record: RunRecord) -> tuple[str, ...]:
    if record.policy_file is None:
        return ()
    policy = "" if record.chosen is None else record.chosen.policy
    is_fused = "\noptimizer: fused\n" in policy
    return (
        "import autoprec",
        f'precision = autoprec.apply(model, "{record.policy_file}")  # before the optimizer is built',
        *(("optimizer = precision.optimizer(optimizer)  # after it is built: fused kernels",) * is_fused),
        f"with precision.loss(): loss = loss_fn(model(x), y)  # then {_backward(record)}",
    )


def _backward(record: RunRecord) -> str:
    """Return what follows the loss: the policy says itself whether it scales the loss."""
    policy = "" if record.chosen is None else record.chosen.policy
    is_scaled = "\nloss_scale: none\n" not in policy
    return "precision.scaler, as any torch.amp.GradScaler" if is_scaled else "loss.backward()"


def _fastest_first(trial: TrialRecord) -> tuple[bool, float, int]:
    return (not trial.is_faithful, -trial.speedup.value if trial.speedup else 0.0, trial.number)


def _speedup_text(trial: TrialRecord) -> str:
    """Return a trial's speed-up in words; that of strict fp32 is 1, and its noise is what there is to see."""
    speedup = speedup_of(trial)
    if speedup is None:
        return ""
    return interval_text(speedup) if trial.name == "fp32" else f"{times_text(speedup)} fp32"


def _skipped(trial: TrialRecord) -> str:
    return f"{count_text(trial.num_skipped, 'step')} skipped by the loss scale" if trial.num_skipped else ""


def _fidelity(fidelity: FidelityRecord) -> str:
    if not math.isfinite(fidelity.steps_lost_frac):
        return fidelity.verdict
    return f"{fidelity.verdict}, {percent_text(fidelity.steps_lost_frac)} lost"


def _steps_lost(fidelity: FidelityRecord) -> str:
    return percent_text(fidelity.steps_lost_frac) if math.isfinite(fidelity.steps_lost_frac) else "-"
