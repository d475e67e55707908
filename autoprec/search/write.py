"""Writing what a run leaves: the policy file and the record."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import autoprec
from autoprec.files import check_writable
from autoprec.policy import resolve, save_policy
from autoprec.records import save_record
from autoprec.records.planner import PlannerRecord
from autoprec.records.run import DeviceRecord, FrontPointRecord, GraphRecord, RunRecord, TrialRecord, VerificationRecord
from autoprec.runtime.device import DeviceInfo
from autoprec.search.budget import Budget
from autoprec.search.decide import speedup_of
from autoprec.search.objective import Objective
from autoprec.search.pareto import pareto_front
from autoprec.search.places import Places
from autoprec.search.policy_lock import policy_lock
from autoprec.search.prices import Prices
from autoprec.search.prove import Prover
from autoprec.search.result import chosen_record, policy_of_outcome
from autoprec.search.search import Found
from autoprec.search.subject import Subject
from autoprec.search.trial_costs import with_trial_errors
from autoprec.workload.origin import shown

_PACKAGES = ("torch", "optuna", "networkx", "scipy")


def write_results(
    found: Found,
    subject: Subject,
    objective: Objective,
    prover: Prover,
    places: Places,
    budget: Budget,
    options: Mapping[str, Any],
) -> RunRecord:
    """Write the policy, with its evidence, and the record; return the record.

    Raises: `OutputError` if one of them cannot be written; the study still has every trial.
    """
    blank = run_record(
        subject,
        objective,
        found.trials,
        command="tune",
        options=options,
        record_file=str(places.record),
        wall_s=budget.now() - budget.started,
    )
    evidence = {
        "record": str(places.record),
        "graph": blank.graph.fingerprint,
        "lock": policy_lock(subject.op_graph, subject.device),
        "seed": subject.seed,
        "seeds": sorted({objective.protocol.seed, prover.protocol.seed}),
        "batches": len(objective.protocol.batches) + len(prover.protocol.batches),
        "versions": dict(blank.versions),
        "interrupted": found.interrupted,
    }
    model = subject.catalog.cost_model
    prices = Prices(model=None if model is None else model.calibrated(objective.step_s))
    policy = policy_of_outcome(
        found.outcome,
        subject.catalog,
        found.checks,
        name=subject.loaded.name,
        sites=subject.op_graph.sites(),
        evidence=evidence,
        prices=prices,
        minimal=found.minimal,
    )
    record = replace(
        blank,
        verdict=found.outcome.verdict,
        chosen=chosen_record(found.outcome, subject.catalog, policy, prices, found.minimal),
        verification=(*found.checks, *_minimal_checks(found)),
        minimal=None if found.minimal is None else found.minimal.record,
        front=_front(found, subject, places, evidence) if options.get("objective") == "pareto" else (),
        search_ended=found.ended,
        policy_file=None if places.policy is None else str(places.policy),
        study=places.storage.replace(f"{Path.cwd()}/", ""),  # as a relative URL where it can be one
        interrupted=found.interrupted,
    )
    save_record(record, places.record)
    if places.policy is not None:
        save_policy(policy, places.policy)
    return record


def _front(found: Found, subject: Subject, places: Places, evidence: Mapping[str, Any]) -> tuple[FrontPointRecord, ...]:
    """Return the Pareto front of the trials; each policy on it is written, as measured once and not verified."""
    points = []
    check_writable(places.front)
    for trial in pareto_front(found.trials):
        speedup = speedup_of(trial)
        assert speedup is not None
        assert trial.memory is not None
        assert trial.gradient_error is not None
        file = places.front / f"{trial.name}.yaml"
        policy = resolve(
            subject.catalog.policy(trial.name, trial.choice), subject.op_graph.sites()
        ).without_dead_rules()
        measured = {
            "verified": False,
            "speedup_vs_fp32": speedup.value,
            "memory_bytes": trial.memory.total_bytes,
            "predicted_gradient_error": trial.gradient_error,
        }
        device = dict(subject.catalog.device)
        save_policy(replace(policy, name=trial.name, device=device, evidence={**evidence, **measured}), file)
        points.append(
            FrontPointRecord(
                trial=trial.number, name=trial.name, speedup=speedup, memory_bytes=trial.memory.total_bytes,
                gradient_error=trial.gradient_error, policy_file=str(file),
            )
        )  # fmt: skip
    return tuple(points)


def _minimal_checks(found: Found) -> tuple[VerificationRecord, ...]:
    """Return the verification of what was written, where that is less than the winner."""
    minimal = found.minimal
    if minimal is None or minimal.check is None:
        return ()
    return (replace(minimal.check, versus_baseline=minimal.versus_best),)


def run_record(
    subject: Subject,
    objective: Objective,
    trials: tuple[TrialRecord, ...],
    *,
    command: Literal["tune", "bench"],
    options: Mapping[str, Any],
    record_file: str,
    wall_s: float,
) -> RunRecord:
    """Return the record of a run, without a verdict."""
    graph, device = subject.op_graph, subject.device
    return RunRecord(
        name=subject.loaded.name,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=shown(subject.loaded.path),
        seed=subject.seed,
        device=device_record(device),
        versions=versions(),
        graph=GraphRecord(
            fingerprint=graph.fingerprint(),
            num_sites=len(graph.sites()),
            num_nodes=len(graph),
            replay_matches=True,  # required of every subject
        ),
        options=options,
        space=asdict(subject.space),
        horizon=objective.protocol.horizon,
        reference_losses=objective.losses,
        chaos_losses=dict(objective.chaos.curves),
        trials=trials,
        verdict=None,
        chosen=None,
        verification=(),
        policy_file=None,
        record_file=record_file,
        study=None,
        interrupted=False,
        wall_s=wall_s,
        planner=_planner(subject, objective, trials),
    )


def _planner(subject: Subject, objective: Objective, trials: tuple[TrialRecord, ...]) -> PlannerRecord | None:
    """Return what the search began with, held against what it measured; None where it began with nothing."""
    if subject.fronts is None:
        return None
    record = replace(subject.fronts.record(), notes=subject.notes)
    return with_trial_errors(record, subject.catalog, trials, objective.step_s)


def device_record(device: DeviceInfo) -> DeviceRecord:
    """Return a device as records hold it."""
    return DeviceRecord(
        kind=device.kind,
        name=device.name,
        formats=device.formats,
        emulated_formats=device.emulated_formats,
        capability=dict(device.capability),
    )


def versions() -> Mapping[str, str]:
    """Return the versions of what a result depends on, as far as they are installed."""
    found = {"autoprec": autoprec.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
