"""How far the cost model is off: predicted against measured step times and saved bytes of several policies."""

import statistics
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from random import Random

from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from autoprec.measure import Ratio, interleave, measure_memory, speedup
from autoprec.measure.op_time import op_clock
from autoprec.measure.paired import FP32
from autoprec.measure.step_time import Clock
from autoprec.policy import Policy, Rule, preset
from autoprec.records.cost import CostErrorRecord, CostModelRecord
from autoprec.search.cost_model import CostModel
from autoprec.search.objective import Protocol

_ROUNDS = 12
_WARMUP = 4  # until the allocator has the memory of a step


def check_cost_model(
    model: CostModel,
    protocol: Protocol,
    policies: Mapping[str, Policy],
    *,
    rounds: int = _ROUNDS,
    clock: Clock | None = None,
) -> tuple[CostModel, CostModelRecord]:
    """Return the model, calibrated on the FP32 step, and how far it is off for `policies`.

    All train side by side, FP32 with them, and are timed in the same interleaved rounds on the clock that ops were
    timed with. The measured time of a policy is that of FP32 times the median ratio within rounds. Policies that cannot
    be predicted, or that are predicted to be far too slow to train, are left out.
    """
    fp32 = preset(FP32, protocol.device)
    chosen = {FP32: fp32, **{name: each for name, each in policies.items() if _is_checked(model, protocol, each)}}
    with ExitStack() as stack:
        runs = {name: stack.enter_context(protocol.train(policy)) for name, policy in chosen.items()}
        times = interleave(
            runs,
            rounds=rounds,
            steps_per_round=1,
            warmup=_WARMUP,
            device=protocol.device,
            clock=clock or op_clock(protocol.device),
        )
        saved = {name: measure_memory(run).saved_bytes for name, run in runs.items()}
    fp32_s = statistics.median(times[FP32])
    calibrated = model.calibrated(fp32_s, saved[FP32])
    errors = {
        name: _error(calibrated, policy, fp32_s, speedup(times[FP32], times[name]), saved[name])
        for name, policy in chosen.items()
    }
    return calibrated, record_of(calibrated, errors)


def record_of(model: CostModel, errors: Mapping[str, CostErrorRecord]) -> CostModelRecord:
    """Return a calibrated model as records hold it."""
    counted = [each for name, each in errors.items() if name != FP32 and not each.is_bound]
    times = model.op_times
    return CostModelRecord(
        num_signatures=times.num_signatures,
        num_from_cache=times.num_from_cache,
        num_unmeasured=times.num_unmeasured,
        measured_s=times.measured_s,
        overhead_s=model.overhead_s,
        median_error=statistics.median(abs(each.time_error) for each in counted) if counted else None,
        median_bytes_error=statistics.median(abs(each.bytes_error) for each in counted) if counted else None,
        errors=errors,
        notes=times.notes,
    )


def random_policies(
    op_graph: OpGraph, low: str, count: int, *, seed: int, kept: Iterable[Site] = ()
) -> Mapping[str, Policy]:
    """Return policies that lower each site with one chance in two, all sites of a layer and op alike; `kept` never."""
    never = {str(site) for site in kept}
    found = {}
    for number in range(count):
        random = Random(f"{seed} {number}")
        groups = dict.fromkeys((site.module, site.op) for site in op_graph.sites())
        low_groups = {group for group in groups if random.random() < 0.5}
        sites = [s for s in op_graph.sites() if (s.module, s.op) in low_groups and str(s) not in never]
        rules = tuple(Rule(sites=str(site), format=low) for site in sites)
        found[f"random-{number}"] = Policy(name=f"random-{number}", rules=(*rules, Rule(sites="*", format=FP32)))
    return found


def _is_checked(model: CostModel, protocol: Protocol, policy: Policy) -> bool:
    if model.unpredictable(policy):
        return False
    reference = model.predict(model.uniform(FP32)).step_s
    return model.predict_policy(policy).step_s <= protocol.slow_limit * reference


def _error(model: CostModel, policy: Policy, fp32_s: float, faster: Ratio, saved_bytes: int) -> CostErrorRecord:
    predicted, step_s = model.predict_policy(policy), fp32_s / faster.median
    return CostErrorRecord(
        step_s=step_s,
        predicted_step_s=predicted.step_s,
        time_error=predicted.step_s / step_s - 1,
        saved_bytes=saved_bytes,
        predicted_saved_bytes=predicted.saved_bytes,
        bytes_error=predicted.saved_bytes / saved_bytes - 1 if saved_bytes else 0.0,
        spread=faster.half_width,
        is_bound=predicted.is_bound,
    )
