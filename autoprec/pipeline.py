"""The story: load, record and mark, train FP32, search, prove, write."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoprec.audit.agreement import held_against_former
from autoprec.audit.audit import run_gates
from autoprec.audit.audited import Audited
from autoprec.audit.gates import GATES
from autoprec.audit.gates.fidelity import FIDELITY, paired_run
from autoprec.audit.gates_file import GatesFile, check_names, load_gates
from autoprec.audit.prepare import audit_record, check_checkpoints, num_seen, unseen_seed
from autoprec.capture import record, require_reproducible
from autoprec.files import check_writable
from autoprec.measure.device_profiles import profile_named
from autoprec.policy import graph_preset_names, policy_or_preset, rule_lines, save_policy
from autoprec.records import AuditRecord, save_audit, save_record
from autoprec.records.run import RunRecord
from autoprec.runtime.device import DeviceInfo, describe
from autoprec.search.broken import check_first_loss
from autoprec.search.budget import Budget
from autoprec.search.fp32 import train_fp32
from autoprec.search.graph_pass import policy_for
from autoprec.search.interrupt import terminated_as_interrupted, uninterrupted
from autoprec.search.lock import run_lock
from autoprec.search.modeled import ModeledPlan, chosen_formats, model_plan, written_policy
from autoprec.search.observer import Observer
from autoprec.search.pareto import Aim
from autoprec.search.places import claim_places
from autoprec.search.resume import resume_or_start
from autoprec.search.search import search_and_prove
from autoprec.search.side_by_side import check_fits, measure_side_by_side
from autoprec.search.study import stored_horizon
from autoprec.search.subject import record_and_mark
from autoprec.search.write import run_record, write_results
from autoprec.workload import LoadedWorkload, load


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What `autoprec tune` was asked for; None stands for the default that depends on workload or device."""

    workload: str
    out: Path = Path("policy.yaml")
    run_dir: Path | None = None
    budget_s: float = 300.0
    trials: int | None = None
    space: Path | None = None
    baselines: tuple[str, ...] = ()
    seed: int = 0
    storage: str | None = None
    study: str | None = None
    device: str = "auto"
    objective: Aim = "time"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What `autoprec bench` was asked for; `horizon` are the steps each policy trains."""

    workload: str
    policy: Path
    run_dir: Path | None = None
    baselines: tuple[str, ...] = ()
    horizon: int = 60
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `autoprec plan` was asked for; no formats: all that the device of the profile has; `out`: a policy file."""

    workload: str
    device_profile: str
    formats: tuple[str, ...] = ()
    out: Path | None = None
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What `autoprec audit` was asked for; without a seed it takes one that tuning has not used; no `only`: all."""

    workload: str
    policy: Path
    gates: Path | None = None
    run_dir: Path | None = None
    seed: int | None = None
    device: str = "auto"
    price_per_hour: float | None = None
    checkpoints: tuple[Path, ...] = ()
    only: tuple[str, ...] = ()


def tune(options: TuneOptions, observer: Observer | None = None) -> RunRecord:
    """Return the record of a whole run; the policy and the record are written.

    After Ctrl-C or SIGTERM the best so far is written and the record says `interrupted`; before there is any,
    `KeyboardInterrupt` is raised.
    """
    watch = observer or Observer()
    budget = Budget(seconds=options.budget_s, trials=options.trials)
    device = describe(options.device)
    loaded = load(options.workload)
    places = claim_places(loaded.name, options.out, options.run_dir, options.storage, options.study)
    with watch, terminated_as_interrupted(), run_lock(places.run_dir):
        stored = stored_horizon(places.storage, places.study)  # a storage that cannot be used is told at once
        watch.stage("recording", budget_s=options.budget_s)
        subject = record_and_mark(
            loaded,
            device,
            options.space,
            options.seed,
            options.baselines,
            options.budget_s,
            places.fronts,
            resumes=stored is not None,
        )
        for note in subject.notes:
            watch.note(f"left out for lack of time: {note}")
        watch.stage("fp32")
        objective, prover = train_fp32(subject, horizon=stored, budget_s=options.budget_s)
        study = resume_or_start(subject, objective, places, watch, options.objective)
        found = search_and_prove(study, objective, prover, subject, budget, watch)
        with uninterrupted():
            return write_results(found, subject, objective, prover, places, budget, _plain(options))


def bench(options: BenchOptions, observer: Observer | None = None) -> RunRecord:
    """Return the record of baselines and one policy measured side by side; it is written as `bench.json`."""
    watch = observer or Observer()
    started = time.monotonic()
    device = describe(options.device)
    if str(options.policy) not in graph_preset_names():
        policy_or_preset(options.policy, str(device.kind))  # a file that is wrong is told before anything runs
    policy_file = str(options.policy) if options.policy.exists() else None
    lines = rule_lines(options.policy) if policy_file else ()
    loaded = load(options.workload)
    run_dir = options.run_dir or Path("runs") / loaded.name
    check_writable(run_dir)
    with watch:
        watch.stage("recording")
        subject = record_and_mark(loaded, device, None, options.seed, options.baselines)
        policy = policy_for(options.policy, str(device.kind), subject.op_graph)
        check_fits(policy, subject, policy_file, lines)
        watch.stage("fp32")
        objective, _ = train_fp32(subject, horizon=options.horizon, budget_s=0.0)
        watch.stage("baselines and the policy")
        trials = measure_side_by_side(objective, subject.catalog.baselines, policy, watch)
        file = run_dir / "bench.json"
        found = run_record(
            subject,
            objective,
            trials,
            command="bench",
            options=_plain(options),
            record_file=str(file),
            wall_s=time.monotonic() - started,
        )
        save_record(found, file)
        return found


def audit(options: AuditOptions, observer: Observer | None = None) -> AuditRecord:
    """Return the record of a policy held against every gate; it is written as `audit.json`, whole or not at all."""
    watch = observer or Observer()
    started = time.monotonic()
    gates = check_names(options.only, GATES)
    file = GatesFile() if options.gates is None else load_gates(options.gates, GATES)
    check_checkpoints(options.checkpoints)
    device = describe(options.device)
    if str(options.policy) not in graph_preset_names():  # a file that is wrong is told before anything runs
        unseen_seed(policy_or_preset(options.policy, str(device.kind)), options.seed)
    loaded = load(options.workload)
    run_dir = options.run_dir or Path("runs") / loaded.name
    check_writable(run_dir)
    with watch, terminated_as_interrupted():
        watch.stage("recording")
        audited = _audited(options, file, loaded, device)
        verdicts = run_gates(gates, audited, file.thresholds, off=file.off, observer=watch)
        file_of_record = run_dir / "audit.json"
        found = held_against_former(
            audit_record(audited, verdicts, policy=str(options.policy), record_file=file_of_record, started=started),
            file_of_record,
        )
        with uninterrupted():
            save_audit(found, file_of_record)
        return found


def _audited(options: AuditOptions, file: GatesFile, loaded: LoadedWorkload, device: DeviceInfo) -> Audited:
    """Return what is audited, on batches and a seed that the search has not seen."""
    kind, is_file = str(device.kind), options.policy.exists()
    is_judged = FIDELITY.name not in file.off and (not options.only or FIDELITY.name in options.only)
    if str(options.policy) in graph_preset_names() and not is_file:
        policy = policy_for(options.policy, kind, record(loaded.workload, device=kind).op_graph)
    else:
        policy = policy_or_preset(options.policy, kind)
    audited = Audited(
        loaded=loaded,
        policy=policy,
        policy_file=options.policy if is_file else None,
        rule_lines=rule_lines(options.policy) if is_file else (),
        device=device,
        seed=unseen_seed(policy, options.seed),
        skip=num_seen(policy),
        price_per_hour=options.price_per_hour,
        checkpoints=options.checkpoints,
        gates_file=options.gates,
        **paired_run(file.thresholds.get(FIDELITY.name, {}), is_judged=is_judged),
    )
    check_first_loss(audited.recording)
    require_reproducible(audited.recording, loaded.workload)
    return audited


def plan(options: PlanOptions) -> ModeledPlan:
    """Return what is predicted for a device that is not at hand; the policy is written if a file is named for it."""
    profile = profile_named(options.device_profile)
    chosen_formats(profile, options.formats)  # what is wrong with them is told before anything runs
    device = describe(options.device)
    loaded = load(options.workload)
    if options.out is not None:
        check_writable(options.out.parent)
    recording = record(loaded.workload, device=device.kind, seed=options.seed)
    check_first_loss(recording)
    require_reproducible(recording, loaded.workload)
    found = model_plan(recording, profile, device, options.formats)
    if options.out is not None:
        save_policy(written_policy(found, loaded.name), options.out)
    return found


def _plain(options: TuneOptions | BenchOptions) -> dict[str, Any]:
    """Return the options as a record holds them."""
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    return plain | {"baselines": list(options.baselines)}
