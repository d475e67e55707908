"""Writing what a run leaves: the policy file and the record."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import autoprec
from autoprec.policy import save_policy
from autoprec.records import save_record
from autoprec.records.run import DeviceRecord, GraphRecord, RunRecord, TrialRecord
from autoprec.search.budget import Budget
from autoprec.search.objective import Objective
from autoprec.search.places import Places
from autoprec.search.policy_lock import policy_lock
from autoprec.search.prove import Prover
from autoprec.search.result import chosen_record, policy_of_outcome
from autoprec.search.search import Found
from autoprec.search.subject import Subject
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
        wall_s=time.monotonic() - budget.started,
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
    policy = policy_of_outcome(
        found.outcome,
        subject.catalog,
        found.checks,
        name=subject.loaded.name,
        sites=subject.op_graph.sites(),
        evidence=evidence,
    )
    record = replace(
        blank,
        verdict=found.outcome.verdict,
        chosen=chosen_record(found.outcome, subject.catalog, policy),
        verification=found.checks,
        policy_file=None if places.policy is None else str(places.policy),
        study=places.storage.replace(f"{Path.cwd()}/", ""),  # as a relative URL where it can be one
        interrupted=found.interrupted,
    )
    save_record(record, places.record)
    if places.policy is not None:
        save_policy(policy, places.policy)
    return record


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
        device=DeviceRecord(
            kind=device.kind,
            name=device.name,
            formats=device.formats,
            emulated_formats=device.emulated_formats,
            capability=dict(device.capability),
        ),
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
        planner=None if subject.fronts is None else subject.fronts.record(),
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
