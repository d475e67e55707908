"""FP32 in working order: its step time, the horizon that fits, the batches, and its curve."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from autoprec.errors import WorkloadError
from autoprec.measure import Training
from autoprec.policy import preset
from autoprec.search.broken import broken_text, origin_at
from autoprec.search.budget import horizon_for
from autoprec.search.objective import Objective, Protocol
from autoprec.search.prove import Prover
from autoprec.search.subject import Subject
from autoprec.workload import Workload, fitting_batches, load_batches

_PROBE_STEPS = 5


def train_fp32(subject: Subject, *, horizon: int | None, budget_s: float) -> tuple[Objective, Prover]:
    """Return FP32 trained over the horizon, with what proves a candidate later.

    `horizon` is that of a study to resume. Without one, the space says, or else the budget and the time of a step.
    Raises: `WorkloadError` if FP32 reaches a loss that is not finite; it names the op where that starts.
    """
    workload, kind, seed = subject.loaded.workload, subject.device.kind, subject.seed
    steps = subject.space.horizon or horizon or horizon_for(budget_s, _probe_step_s(workload, kind, seed))
    batches, others = split_batches(workload, steps, kind)
    protocol = Protocol(
        workload=workload,
        device=kind,
        seed=seed,
        batches=batches,
        horizon=steps,
        margin=subject.space.margin,
        slow_limit=subject.space.slow_limit,
    )
    return sound_objective(protocol), Prover(protocol, others)


def split_batches(workload: Workload, horizon: int, device: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return batches for the trials, and other ones, as far as the workload has them, for the proof.

    All of them are kept on the device, up to a gibibyte; runs start over where they end.
    """
    batches = load_batches(workload, max(3, fitting_batches(workload, 3 * horizon, device)), device)
    return batches[: len(batches) // 3], batches[len(batches) // 3 :]


def sound_objective(protocol: Protocol) -> Objective:
    """Return the objective with its FP32 curve, which must be finite."""
    objective = Objective(protocol)
    bad = next((step for step, loss in enumerate(objective.losses) if not math.isfinite(loss)), None)
    if bad is None:
        return objective
    objective.close()
    raise WorkloadError(broken_text(objective.losses[bad], bad + 1, origin_at(protocol, bad)))


def _probe_step_s(workload: Workload, device: str, seed: int) -> float:
    """Return about how long an FP32 step takes."""
    batches = load_batches(workload, 1, device)
    with Training(workload, preset("fp32", device), device=device, seed=seed, batches=batches) as run:
        seconds = []
        for _ in range(_PROBE_STEPS):
            started = time.perf_counter()
            run.step()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
