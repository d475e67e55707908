"""The plan for a device that is not at hand: times and memory modeled from its row of data, fidelity emulated here.

The step is recorded, marked and run low on the device at hand with ideal kernels, which round and compute in FP32:
what a format costs in accuracy anywhere. The plans are exact cuts over modeled costs. Chosen is the fastest one whose
gradient error, predicted and then emulated, a healthy step may show (`autoprec.analysis.faults`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoprec.capture import Recording
from autoprec.errors import FormatError
from autoprec.measure.device_profiles import DeviceProfile
from autoprec.measure.paired import FP32
from autoprec.policy import FLOAT8, Policy, resolve
from autoprec.runtime.device import DeviceInfo
from autoprec.search.modeled_step import ModeledPolicy, ModeledStep


@dataclass(frozen=True, kw_only=True)
class ModeledPlan:
    """What is predicted for a device: every figure is modeled.

    `best` is the fastest healthy policy, which may be a baseline. `plan` is the fastest healthy plan; None if none is
    healthy, none saves time, or the device has no low format. `front` are plans that no other dominates. `kept` counts
    the reasons of the sites that `best` keeps in FP32. `left_out` says why a baseline has no prediction.
    """

    profile: DeviceProfile
    formats: tuple[str, ...]
    emulated_on: str
    num_sites: int
    fp32: ModeledPolicy
    baselines: tuple[ModeledPolicy, ...]
    left_out: Mapping[str, str]
    front: tuple[ModeledPolicy, ...]
    plan: ModeledPolicy | None
    best: ModeledPolicy
    kept: Mapping[str, int]


def model_plan(
    recording: Recording, profile: DeviceProfile, device: DeviceInfo, formats: Sequence[str] = ()
) -> ModeledPlan:
    """Return the plan for a profile of a step that was recorded on `device`; no formats: all that the profile has.

    Raises: `FormatError` for a format that the device of the profile has no units for.
    """
    formats = chosen_formats(profile, formats)
    step = ModeledStep(recording, profile, formats)
    known, left_out = step.baselines()
    plans = sorted(step.plans(), key=lambda each: (each.step_s, each.predicted_error))
    plan = next(_healthy(step, plans), None)
    best = min([*(each for each in known if each.is_healthy), *([plan] if plan else [])], key=lambda each: each.step_s)
    return ModeledPlan(
        profile=profile,
        formats=formats,
        emulated_on=device.name,
        num_sites=len(recording.op_graph.sites()),
        fp32=next(each for each in known if each.name == FP32),
        baselines=known,
        left_out=left_out,
        front=tuple(_undominated(plans)),
        plan=plan,
        best=best,
        kept=_kept(best, recording),
    )


def chosen_formats(profile: DeviceProfile, formats: Sequence[str]) -> tuple[str, ...]:
    """Return the low formats to plan in; none are given: all that the profile has units for.

    Raises: `FormatError` for a format that it has none for, and for FP8 without bf16, which the rest runs in.
    """
    runs = (*profile.low_formats, *((FLOAT8,) if profile.has_float8 else ()))
    for name in formats:
        if name not in runs:
            raise FormatError(
                f'--formats: {profile.title} has no units for "{name}"; low formats of the profile {profile.name}: '
                f"{', '.join(runs) or 'none'}"
            )
    if FLOAT8 in formats and "bf16" not in formats:
        raise FormatError(f"--formats: {FLOAT8} alone; what does not multiply runs in bf16: give bf16,{FLOAT8}")
    return tuple(formats) or runs


def evidence_of(plan: ModeledPlan) -> dict[str, str | float | bool]:
    """Return what the policy file says of where its figures come from."""
    best = plan.best
    return {
        "modeled": True,
        "device_profile": plan.profile.name,
        "emulated_on": plan.emulated_on,
        "modeled_step_s": best.step_s,
        "modeled_speedup_vs_fp32": plan.fp32.step_s / best.step_s,
        **({} if math.isnan(best.error) else {"emulated_gradient_error": best.error}),
    }


def written_policy(plan: ModeledPlan, name: str) -> Policy:
    """Return the best policy as it is written: for the device of the profile, with its evidence."""
    device = {"kind": plan.profile.kind, "name": plan.profile.title}
    return replace(plan.best.policy, name=name, device=device, evidence=evidence_of(plan))


def _healthy(step: ModeledStep, plans: Sequence[ModeledPolicy]) -> Iterator[ModeledPolicy]:
    """Yield the plans that are healthy, the fastest first; each is emulated only if its predicted error allows it."""
    for each in plans:
        if each.predicted_error <= each.limit:
            emulated = step.emulated(each)
            if emulated.is_healthy:
                yield emulated


def _undominated(plans: Sequence[ModeledPolicy]) -> Iterator[ModeledPolicy]:
    """Yield the plans, the fastest first, that no faster one equals in both predicted error and memory."""
    seen: list[ModeledPolicy] = []
    for each in plans:
        if not any(o.predicted_error <= each.predicted_error and o.saved_bytes <= each.saved_bytes for o in seen):
            seen.append(each)
            yield each


def _kept(best: ModeledPolicy, recording: Recording) -> dict[str, int]:
    resolved = resolve(best.policy, recording.op_graph.sites())
    sites = [site for site, fmt in resolved.formats.items() if fmt == FP32]
    reasons = Counter(resolved.rule(site).why or "the policy says so" for site in sites)
    return dict(reasons.most_common())
