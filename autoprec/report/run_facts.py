"""The facts of a run: what was looked at, on what, for how long, and how well it was predicted."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from autoprec.records.planner import MinimalRecord, PlannerRecord
from autoprec.records.quantities import count_text, percent_text, seconds_text
from autoprec.records.run import UNPROVEN, ChosenRecord, RunRecord, TrialRecord

_ENDED_EARLY = {"pruned": "ended early", "failed": "failed"}
_ENDS: Mapping[str, str] = MappingProxyType(
    {
        "trials": "with the number of trials that was asked for",
        "exhausted": "before the budget was spent: the space has nothing new that is worth a trial",
    }
)


def run_facts(record: RunRecord) -> tuple[tuple[str, str], ...]:
    """Return what was looked at, on what, how long, and what came of it, as pairs of label and text."""
    trials = measured_trials(record)
    states = [trial.state for trial in trials if trial.was_run]
    measured = f"{num_measured(record)} in {seconds_text(record.wall_s)}"
    details = [f"{states.count(state)} {word}" for state, word in _ENDED_EARLY.items() if state in states]
    untried = [trial.reason.startswith(UNPROVEN) for trial in trials if not trial.was_run]
    for is_marked, why in ((False, "predicted to be too slow"), (True, "marks forbid them")):
        if is_marked in untried:
            details.append(f"{untried.count(is_marked)} more not tried, as {why}")
    graph = record.graph
    return (
        ("workload", f"{record.workload}: {graph.num_sites} sites, {graph.num_nodes} nodes, graph {graph.fingerprint}"),
        ("device", f"{record.device.name} ({record.device.kind}), torch {record.versions.get('torch', '?')}"),
        ("measured", f"{measured}, {record.horizon} steps each" + (f"; {', '.join(details)}" if details else "")),
        *_ended(record),
        *_planned(record.planner),
        *_held_against(record.planner),
        *_minimal(record.minimal),
        *_lowered(record.chosen),
    )


def _planned(planner: PlannerRecord | None) -> Iterator[tuple[str, str]]:
    """Yield what the search began with: the predicted plans, and what was measured to make them."""
    if planner is None:
        return
    units = sum(each.num_measured for each in planner.errors.values())
    ops, groups = count_text(planner.num_signatures, "op"), count_text(units, "group")
    sources = f"times of {ops} and errors of {groups}"
    if not planner.plans:
        yield "planned", f"nothing: by the {sources}, no site is faster low"
        return
    best = max(planner.plans, key=lambda plan: plan.saved_s)
    number = count_text(len(planner.plans), "plan", "plans")
    yield (
        "planned",
        f"{number} from the {sources}; the fastest saves {1e3 * best.saved_s:.3g} ms a step with "
        f"{best.num_low_sites} sites in {best.low}, predicted",
    )


def measured_trials(record: RunRecord) -> tuple[TrialRecord, ...]:
    """Return the trials that are policies of their own."""
    return tuple(trial for trial in record.trials if trial.state != "duplicate")


def num_measured(record: RunRecord) -> str:
    """Return how many policies were measured, in words."""
    return count_text(sum(trial.was_run for trial in record.trials), "policy", "policies")


def _ended(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield what ended the search, where it was not the budget."""
    end = _ENDS.get(record.search_ended or "")
    if end is not None:
        yield "search", f"ended {end}"


def _held_against(planner: PlannerRecord | None) -> Iterator[tuple[str, str]]:
    """Yield how far the cost model was off, and what the budget left out."""
    if planner is not None and planner.median_time_error is not None:
        number = sum(not each.is_bound for each in planner.trial_errors.values())
        text = (
            f"step times are off by {percent_text(planner.median_time_error)} (median of {count_text(number, 'trial')})"
        )
        if planner.median_bytes_error is not None:
            text += f", saved bytes by {percent_text(planner.median_bytes_error)}"
        yield "predictions", text
    if planner is not None and planner.num_unmeasured:
        yield (
            "not timed",
            f"{count_text(planner.num_unmeasured, 'op', 'ops')}, for lack of time: they stay in fp32 in plans",
        )
    for note in () if planner is None else planner.notes:
        yield "left out", note


def _minimal(minimal: MinimalRecord | None) -> Iterator[tuple[str, str]]:
    """Yield what was taken out of the winner."""
    if minimal is None:
        return
    tried = f"{count_text(minimal.num_trials, 'policy', 'policies')} verified"
    rest = "" if minimal.is_whole else "; the time was over before all was tried"
    if minimal.removed:
        yield "taken out", f"{', '.join(minimal.removed)}: not needed ({tried}){rest}"
    else:
        yield "taken out", f"nothing ({tried}){rest}" + (f": {minimal.reason}" if minimal.reason else "")


def _lowered(chosen: ChosenRecord | None) -> Iterator[tuple[str, str]]:
    """Yield what runs low in spite of its marks."""
    for row in () if chosen is None else chosen.lowered:
        yield "low in spite of a mark", f"{row.sites}: {row.why}"
