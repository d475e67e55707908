"""Records for tests: no field has its default value."""

from dataclasses import replace

from autoprec.records.planner import MinimalRecord, PlannerRecord, PlanRecord, SiteErrorsRecord, TrialCostRecord
from autoprec.records.run import (
    ChosenRecord,
    DeviceRecord,
    FidelityRecord,
    FrontPointRecord,
    GraphRecord,
    Interval,
    KeptRecord,
    MemoryRecord,
    RunRecord,
    TrialRecord,
    VerificationRecord,
)

FAITHFUL = FidelityRecord(
    verdict="faithful",
    reason="faithful: 0.1 % of steps lost",
    horizon=40,
    steps_lost_frac=0.001,
    lower_frac=-0.002,
    upper_frac=0.004,
    margin=0.01,
    margin_asked=0.01,
    chaos_frac=0.0005,
    power_frac=0.002,
    growth_p_value=0.4,
    projected_frac=0.002,
)
MEMORY = MemoryRecord(
    parameter_bytes=4000,
    gradient_bytes=4000,
    optimizer_bytes=8000,
    saved_bytes=3000,
    total_bytes=19000,
)


def trial(
    name: str,
    speedup: float | None,
    *,
    kind: str = "search",
    number: int = 0,
    spread: float = 0.01,
    verdict: str = "faithful",
    state: str = "complete",
) -> TrialRecord:
    """Return a measured trial."""
    interval = None if speedup is None else Interval(value=speedup, low=speedup - spread, high=speedup + spread)
    return TrialRecord(
        number=number,
        name=name,
        kind=kind,  # type: ignore[arg-type]
        state=state,  # type: ignore[arg-type]
        reason="because",
        choice={"low": "bf16", "loss_scale.initial": 1024.0},
        key="bf16|ieee|a:linear#0",
        duplicate_of=7,
        step_s=0.002,
        reference_step_s=0.004,
        speedup=interval,
        fidelity=replace(FAITHFUL, verdict=verdict),  # type: ignore[arg-type]
        memory=MEMORY,
        gradient_error=0.03,
        num_steps=40,
        num_skipped=1,
        wall_s=0.3,
        losses=(2.0, 1.5, float("inf")),
        step_times_s=(0.002, 0.0021),
        reference_step_times_s=(0.004, 0.0041),
    )


RUN = RunRecord(
    name="mlp",
    command="tune",
    created="2026-11-30T06:00:00+00:00",
    workload="mlp.py",
    seed=3,
    device=DeviceRecord(kind="cpu", name="Testium, AMX", formats=("fp32", "bf16"), capability={"amx": True}),
    versions={"torch": "2.13.0", "autoprec": "0.1.0"},
    graph=GraphRecord(fingerprint="abc", num_sites=5, num_nodes=12, replay_matches=True),
    options={"budget_s": 60.0, "trials": 4},
    space={"low": ["bf16"]},
    horizon=40,
    reference_losses=(2.0, 1.5),
    chaos_losses={"bf16": (2.0, 1.51)},
    trials=(
        trial("fp32", 1.0, kind="baseline", number=0),
        trial("autocast-bf16", 1.2, kind="baseline", number=1),
        trial("graph-pass-bf16", 1.4, kind="plan", number=2),
        trial("search-3", None, number=3, verdict="unfaithful", state="pruned"),
    ),
    verdict="improved",
    chosen=ChosenRecord(
        name="graph-pass-bf16",
        kind="plan",
        trial=2,
        verified=True,
        speedup_vs_fp32=Interval(value=1.4, low=1.39, high=1.41),
        speedup_vs_best_baseline=Interval(value=1.16, low=1.1, high=1.2),
        best_baseline="autocast-bf16",
        low_sites=4,
        num_sites=5,
        kept=(KeptRecord(sites="*:softmax", num_sites=1, why="logs of softmaxes", price_frac=0.008),),
        policy="autoprec: 1\n",
    ),
    verification=(
        VerificationRecord(
            name="graph-pass-bf16",
            passed=True,
            reason="faithful",
            seed=4,
            horizon=80,
            fidelity=FAITHFUL,
            evaluate_reference=0.5,
            evaluate_candidate=0.51,
            versus_baseline=Interval(value=1.16, low=1.1, high=1.2),
            losses=(2.0, 1.4),
            reference_losses=(2.0, 1.41),
        ),
    ),
    policy_file="policy.yaml",
    record_file="runs/mlp/record.json",
    study="sqlite:///study.db",
    interrupted=True,
    wall_s=12.5,
    planner=PlannerRecord(
        plans=(PlanRecord(low="bf16", num_low_sites=3, saved_s=0.002, error=0.05),),
        num_signatures=9,
        num_from_cache=4,
        num_unmeasured=1,
        op_times_s=1.5,
        errors={"bf16": SiteErrorsRecord(num_units=5, num_measured=4, rank_correlation=0.75)},
        notes=("fp16: what it breaks",),
        trial_errors={
            "graph-pass-bf16": TrialCostRecord(
                step_s=0.002, predicted_step_s=0.0021, time_error=0.05, bytes_error=-0.02, spread=0.01, is_bound=True
            )
        },
        median_time_error=0.05,
        median_bytes_error=0.02,
    ),
    minimal=MinimalRecord(
        num_groups=3,
        num_trials=2,
        removed=("*:layer_norm",),
        needed={"*:softmax": "5 % lost"},
        is_whole=False,
        reason="as told",
        memory_bytes=18000,
    ),
    front=(
        FrontPointRecord(
            trial=2,
            name="graph-pass-bf16",
            speedup=Interval(value=1.4, low=1.39, high=1.41),
            memory_bytes=19000,
            gradient_error=0.03,
            policy_file="runs/mlp/front/graph-pass-bf16.yaml",
        ),
    ),
    search_ended="exhausted",
)
