"""The record of one `autoprec tune` or `autoprec bench` run: values only, in the order they are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from autoprec.records.planner import MinimalRecord, PlannerRecord

SCHEMA_VERSION = 1
UNPROVEN = "lowers marked sites"  # how the reason of a trial begins that no faithful one allows

TrialKind: TypeAlias = Literal["baseline", "plan", "search", "policy"]
TrialState: TypeAlias = Literal["complete", "pruned", "failed", "duplicate", "running", "waiting"]
FidelityVerdict: TypeAlias = Literal["faithful", "unfaithful", "inconclusive"]
Verdict: TypeAlias = Literal["improved", "tie", "baseline"]
SearchEnd: TypeAlias = Literal["budget", "trials", "exhausted", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its confidence interval, `low <= value <= high`."""

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Return half the width of the interval as a fraction of the value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRecord:
    """The device everything was measured on, as `runtime.device` describes it."""

    kind: str
    name: str
    formats: tuple[str, ...] = ()
    emulated_formats: tuple[str, ...] = ()
    capability: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRecord:
    """The recorded step in four numbers; `fingerprint` is equal for equal architectures."""

    fingerprint: str
    num_sites: int
    num_nodes: int
    replay_matches: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityRecord:
    """How far a loss curve lags behind the paired FP32 one; fractions are of the horizon.

    `upper_frac`, the upper confidence bound of the steps lost, is held against `margin`, which is `margin_asked`,
    widened by `chaos_frac` where FP32 nudged by one rounding loses more. `power_frac` is the smallest loss of steps
    this comparison could have seen. `projected_frac` are the steps lost after two horizons if the trend goes on.
    `by_first_step`: the verdict is that of a first step in FP32 by other kernels; the curves cannot tell.
    """

    verdict: FidelityVerdict
    reason: str
    horizon: int
    steps_lost_frac: float
    lower_frac: float
    upper_frac: float
    margin: float
    margin_asked: float
    chaos_frac: float
    power_frac: float
    growth_p_value: float
    projected_frac: float
    by_first_step: bool = False

    @property
    def passed(self) -> bool:
        """Return whether the curve counts as faithful."""
        return self.verdict == "faithful"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord:
    """What one copy of the training run holds; `saved_bytes` are kept for the backward pass."""

    total_bytes: int
    saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRecord:
    """What a run showed at its end that a guard can compare with; None where the policy has nothing of the kind.

    `loss_scale` is where scaling came to rest. The fractions are of the gradients of layers in a narrow format, as
    `runtime.guard` looks at them: what flushes, of all layers and of the worst one, and what is near the range's end.
    """

    loss_scale: float | None = None
    flush_frac: float | None = None
    layer_flush_frac: float | None = None
    overflow_frac: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """One policy that was really trained and really timed, or the reason why it was not.

    `losses` and the step times are one number a step, candidate and FP32 reference paired by round.
    `gradient_error` is relative, and predicted as if errors of different sites were independent; None where those of a
    format are not known.
    `choice` holds the parameters the search chose; a baseline has none. A trial with `emulated` formats has a fidelity
    and no times, since emulation says nothing about speed. `compile_s` is the time of the first steps, which are not
    timed, where the policy compiles the model.
    """

    number: int
    name: str
    kind: TrialKind
    state: TrialState
    reason: str = ""
    choice: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    duplicate_of: int | None = None
    step_s: float | None = None
    reference_step_s: float | None = None
    speedup: Interval | None = None
    emulated: tuple[str, ...] = ()
    fidelity: FidelityRecord | None = None
    memory: MemoryRecord | None = None
    gradient_error: float | None = None
    health: HealthRecord | None = None
    num_steps: int = 0
    num_skipped: int = 0
    wall_s: float = 0.0
    compile_s: float = 0.0
    losses: tuple[float, ...] = ()
    step_times_s: tuple[float, ...] = ()
    reference_step_times_s: tuple[float, ...] = ()

    @property
    def was_run(self) -> bool:
        """Return whether the policy was run for this trial: neither in an earlier one, nor only predicted."""
        return self.state != "duplicate" and (self.num_steps > 0 or self.wall_s > 0)

    @property
    def is_faithful(self) -> bool:
        """Return whether the trial ran to its horizon and its loss curve matches the FP32 one."""
        return self.state == "complete" and self.fidelity is not None and self.fidelity.passed


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationRecord:
    """A candidate trained again on a longer horizon, other batches and another seed, paired against FP32.

    `versus_baseline` is its speed-up over the best baseline, both timed in the same interleaved rounds.
    """

    name: str
    passed: bool
    reason: str
    seed: int
    horizon: int
    fidelity: FidelityRecord | None = None
    evaluate_reference: float | None = None
    evaluate_candidate: float | None = None
    versus_baseline: Interval | None = None
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRecord:
    """Sites by pattern, and why the written policy keeps them in FP32, or does not.

    `price_frac` is what FP32 is predicted to cost there, in steps.
    """

    sites: str
    num_sites: int
    why: str
    price_frac: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenRecord:
    """The policy that was written and what it costs and gains. `verified` says whether it was trained a second time.

    `lowered` are sites that run low although they were marked to stay FP32, and which trial showed that they can.
    """

    name: str
    kind: TrialKind
    trial: int
    verified: bool
    speedup_vs_fp32: Interval | None
    speedup_vs_best_baseline: Interval | None
    best_baseline: str
    low_sites: int
    num_sites: int
    kept: tuple[KeptRecord, ...]
    policy: str
    lowered: tuple[KeptRecord, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPointRecord:
    """A faithful trial on the Pareto front of time, memory and gradient error, and the policy file that was written."""

    trial: int
    name: str
    speedup: Interval
    memory_bytes: int
    gradient_error: float
    policy_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything one run measured. Units: seconds and bytes, as the names say.

    `search_ended` says what ended the search: the time, the number of trials, or that nothing new was proposed.
    `chaos_losses` are those of FP32 runs whose weights were nudged by one rounding of the format that is the key.
    """

    name: str
    command: Literal["tune", "bench"]
    created: str
    workload: str
    seed: int
    device: DeviceRecord
    versions: Mapping[str, str]
    graph: GraphRecord
    options: Mapping[str, Any]
    space: Mapping[str, Any]
    horizon: int
    reference_losses: tuple[float, ...]
    chaos_losses: Mapping[str, tuple[float, ...]]
    trials: tuple[TrialRecord, ...]
    verdict: Verdict | None
    chosen: ChosenRecord | None
    verification: tuple[VerificationRecord, ...]
    policy_file: str | None
    record_file: str
    study: str | None
    interrupted: bool
    wall_s: float
    planner: PlannerRecord | None = None
    minimal: MinimalRecord | None = None
    front: tuple[FrontPointRecord, ...] = ()
    search_ended: SearchEnd | None = None

    @property
    def baselines(self) -> tuple[TrialRecord, ...]:
        """Return the trials nobody searched for, in the order they ran."""
        return tuple(trial for trial in self.trials if trial.kind == "baseline")
