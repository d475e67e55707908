"""Views: every number, label, unit and order that a report shows, computed from a record alone."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.records.planner import minimal_name
from autoprec.records.quantities import (
    bytes_text,
    count_text,
    interval_text,
    percent_text,
    seconds_text,
    times_text,
)
from autoprec.records.run import (
    ChosenRecord,
    FidelityRecord,
    FrontPointRecord,
    KeptRecord,
    RunRecord,
    TrialRecord,
)
from autoprec.report.run_facts import measured_trials, num_measured, run_facts
from autoprec.search.decide import faithful_baselines, speedup_of

_AS_FP32 = "as fp32"


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
    price: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontRow:
    """One policy of the Pareto front."""

    name: str
    speedup: str
    memory: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """What an engineer needs to act on a run, in reading order."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    baselines_title: str
    baselines: tuple[TrialRow, ...]
    best_title: str
    best: tuple[TrialRow, ...]
    front_title: str
    front: tuple[FrontRow, ...]
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
        facts=run_facts(record),
        baselines_title=_baselines_title(record),
        baselines=tuple(_trial_row(trial, record) for trial in record.baselines),
        best_title=_best_title(record, others),
        best=tuple(_trial_row(trial, record) for trial in others),
        front_title=_front_title(record),
        front=tuple(_front_row(point) for point in record.front),
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
        return f"{record.workload}: {num_measured(record)} measured on {record.device.name}"
    state = "" if chosen.verified else ", not verified: the run was interrupted" * record.interrupted
    rival = _rival(record, chosen)
    if record.verdict == "improved":
        fp32 = f"{times_text(chosen.speedup_vs_fp32)} as fast as fp32 and " * (chosen.best_baseline != "fp32")
        return (
            f"{chosen.name} trains {fp32}"
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
    name = "" if record.chosen is None else record.chosen.name
    if record.minimal is not None and record.minimal.removed:
        name = minimal_name(name)
    for verification in record.verification:
        if verification.name == name and verification.passed:
            return verification.fidelity or (None if trial is None else trial.fidelity)
    return None if trial is None else trial.fidelity


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
    return tuple(
        KeptRow(sites=row.sites, count=count_text(row.num_sites, "site"), why=row.why, price=_price(row))
        for row in rows
    )


def _front_title(record: RunRecord) -> str:
    """Return what a front is of, and where its policies lie."""
    files = [point.policy_file for point in record.front if point.policy_file is not None]
    if not record.front:
        return ""
    place = f"; policies in {files[0].rpartition('/')[0]}/, each trained once, not verified" if files else ""
    return f"Pareto front of time, memory and gradient error{place}"


def _front_row(point: FrontPointRecord) -> FrontRow:
    return FrontRow(
        name=point.name,
        speedup=interval_text(point.speedup),
        memory=bytes_text(point.memory_bytes),
        error=f"{point.gradient_error:.2g}",
    )


def _price(row: KeptRecord) -> str:
    """Return what FP32 is predicted to cost at some sites; a site that a low format would slow down costs nothing."""
    return "" if row.price_frac is None or row.price_frac < 0 else f"{percent_text(row.price_frac)} of a step"


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
    held = written_bytes(record, trial)
    if held is not None:
        lines.append(("memory", _memory_change(record, held)))
    return tuple(lines)


def written_bytes(record: RunRecord, trial: TrialRecord | None) -> int | None:
    """Return what one copy of a run holds under the policy that is written; `trial` is that of the winner."""
    if record.minimal is not None and record.minimal.memory_bytes is not None:
        return record.minimal.memory_bytes
    return None if trial is None or trial.memory is None else trial.memory.total_bytes


def _memory_change(record: RunRecord, held: int) -> str:
    text = f"{bytes_text(held)} for one copy"
    fp32 = next((each.memory for each in record.baselines if each.name == "fp32"), None)
    if fp32 is None or fp32.total_bytes == 0:
        return text
    return f"{text}, {held / fp32.total_bytes:.2f} times that of fp32"


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
    if fidelity.by_first_step:
        return f"{fidelity.verdict}, {_AS_FP32} by its first step"
    return f"{fidelity.verdict}, {percent_text(fidelity.steps_lost_frac)} lost"


def _steps_lost(fidelity: FidelityRecord) -> str:
    """Return the steps lost; of curves that cannot tell, that the first step is FP32's."""
    if fidelity.by_first_step:
        return _AS_FP32
    return percent_text(fidelity.steps_lost_frac) if math.isfinite(fidelity.steps_lost_frac) else "-"
