"""Baselines: the policies nobody searched for that a device can run."""

from collections.abc import Collection, Mapping

from autoprec.numerics import format_named
from autoprec.policy import Policy, preset, preset_names


def baselines(device_kind: str, formats: Collection[str], matmul_precisions: Collection[str]) -> Mapping[str, Policy]:
    """Return the presets whose formats and FP32 matmul precision the device has, from the simplest on."""
    policies = {name: preset(name, device_kind) for name in preset_names(device_kind)}
    return {
        name: policy
        for name, policy in policies.items()
        if used_formats(policy) <= set(formats) and set(policy.matmul_precisions) <= set(matmul_precisions)
    }


def used_formats(policy: Policy) -> set[str]:
    """Return the formats that sites run in or parameters are stored in."""
    return {*policy.formats, policy.parameters.storage}


def coarsest_format(policy: Policy) -> str | None:
    """Return the format with the fewest significant bits that a policy rounds to; None for plain FP32."""
    matmul = set(policy.matmul_precisions) - {"ieee"}
    rounded = sorted((used_formats(policy) | matmul) - {"fp32"})
    return min(rounded, key=lambda name: format_named(name).significant_bits) if rounded else None


def rounding_of(format_name: str) -> float:
    """Return the largest relative error of one rounding to a normal number of the format."""
    return float(2.0 ** -format_named(format_name).significant_bits)
