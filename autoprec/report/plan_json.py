"""What `autoprec plan --json` prints, computed from a modeled plan alone."""

import math
from collections.abc import Iterable
from typing import Any

from autoprec.measure.device_profiles import DeviceProfile
from autoprec.search.modeled import ModeledPlan
from autoprec.search.modeled_step import ModeledPolicy


def plan_json(plan: ModeledPlan, *, workload: str, policy_file: str | None) -> dict[str, Any]:
    """Return a modeled plan; `modeled` says of all its times and bytes that nothing was measured."""
    return {
        "schema_version": 1,
        "modeled": True,
        "workload": workload,
        "device_profile": profile_json(plan.profile),
        "formats": list(plan.formats),
        "fidelity_emulated_on": plan.emulated_on,
        "num_sites": plan.num_sites,
        "best": _policy(plan.best, plan),
        "plan": None if plan.plan is None else _policy(plan.plan, plan),
        "baselines": [_policy(each, plan) for each in plan.baselines],
        "baselines_without_prediction": dict(plan.left_out),
        "front": [_policy(each, plan) for each in plan.front],
        "kept": [{"num_sites": count, "why": reason} for reason, count in plan.kept.items()],
        "policy": policy_file,
    }


def profiles_json(profiles: Iterable[DeviceProfile]) -> dict[str, Any]:
    """Return every profile with every figure, its source and its date."""
    return {"schema_version": 1, "profiles": [profile_json(each) for each in profiles]}


def profile_json(profile: DeviceProfile) -> dict[str, Any]:
    """Return one profile."""
    figures = {
        name: {"value": each.value, "source": each.source, "date": each.date}
        for name, each in profile.figures().items()
    }
    return {
        "name": profile.name,
        "device": profile.title,
        "kind": profile.kind,
        "space": profile.space,
        "has_tf32": profile.has_tf32,
        "has_fp8": profile.has_float8,
        "figures": figures,
    }


def _policy(each: ModeledPolicy, plan: ModeledPlan) -> dict[str, Any]:
    return {
        "name": each.name,
        "modeled": True,
        "step_s": each.step_s,
        "speedup_vs_fp32": plan.fp32.step_s / each.step_s,
        "saved_bytes": each.saved_bytes,
        "num_low": each.num_low,
        "num_fp8": each.num_float8,
        "emulated_gradient_error": _finite(each.error),
        "predicted_gradient_error": _finite(each.predicted_error),
        "healthy_up_to": _finite(each.limit),
        "healthy": each.is_healthy,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
