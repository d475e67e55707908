"""Baselines: the policies nobody searched for that a device can run."""

import difflib
from collections.abc import Collection, Mapping, Sequence

from autoprec.errors import SpaceError
from autoprec.graph.convolutions import has_convolutions
from autoprec.graph.opgraph import OpGraph
from autoprec.numerics import format_named
from autoprec.policy import AS_GIVEN, COMPANIONS, PRESETS, Policy, graph_preset_names, preset
from autoprec.runtime.device import DeviceInfo
from autoprec.search.graph_pass import low_of, policy_for
from autoprec.search.space import BASELINE_GROUPS


def baselines(
    device: DeviceInfo,
    matmul_precisions: Collection[str],
    op_graph: OpGraph,
    chosen: Sequence[str] = ("default",),
    *,
    with_layouts: bool = True,
    compiled: bool = False,
) -> Mapping[str, Policy]:
    """Return the chosen presets for a device and a graph, in the order of the presets; fp32 is always among them.

    `chosen` are names of presets, `default` and `all`. `default` are those that the device runs, and of the systems
    people know those that it has native units for; `all` are all that it runs. Neither has one that it emulates, nor
    one that is about the layout of convolutions where the graph has none, nor, without `with_layouts`, one with
    channels_last, nor, without `compiled`, one under torch.compile.

    Raises: `SpaceError` for a name that is no preset for the device, or one that the device cannot run or emulates.
    """
    check_chosen(chosen, device, matmul_precisions)
    rows = {name: row for name, row in PRESETS.items() if device.kind in row.kinds}
    policies = {name: policy_for(name, device.kind, op_graph) for name in rows}
    runs = {name for name in rows if not _lacking(name, device, matmul_precisions)}
    native = {name for name in runs if _formats(name, device.kind) <= set(device.native_formats)}
    groups = {"default": {name for name in runs if rows[name].baseline == "runs"} | native, "all": runs}
    if not has_convolutions(op_graph):
        left_out = {name for name, row in rows.items() if row.for_convolutions}
    else:
        left_out = {
            name for name, policy in policies.items() if policy.memory_format != "as_given" and not with_layouts
        }
    if not compiled:
        left_out |= {name for name, policy in policies.items() if policy.compile != "as_given"}
    wanted = {"fp32"}.union(*(groups[name] - left_out if name in groups else {name} for name in chosen))
    return {name: policy for name, policy in policies.items() if name in wanted}


def check_chosen(chosen: Sequence[str], device: DeviceInfo, matmul_precisions: Collection[str]) -> None:
    """Return if all chosen baselines are presets that the device runs; no graph is needed to tell.

    Raises: `SpaceError` as `baselines` does.
    """
    names = [name for name, row in PRESETS.items() if device.kind in row.kinds]
    for name in (name for name in chosen if name not in BASELINE_GROUPS):
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f'; nearest: "{near[0]}"' if near else ""
            allowed = ", ".join((*BASELINE_GROUPS, *names))
            raise SpaceError(f'baseline "{name}" is not a preset for {device.kind}; allowed: {allowed}{hint}')
        lacking = _lacking(name, device, matmul_precisions)
        if lacking:
            raise SpaceError(
                f'baseline "{name}" uses {", ".join(lacking)}, which {device.name} does not run, or only emulates, so '
                "its speed cannot be measured; leave it out"
            )


def names_in(text: str | None) -> tuple[str, ...]:
    """Return the names in a text that has commas between them."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _lacking(name: str, device: DeviceInfo, matmul_precisions: Collection[str]) -> list[str]:
    """Return the formats, and the precisions inside FP32 matmuls, that the device does not have for a preset."""
    inside = () if name in graph_preset_names() else preset(name, device.kind).matmul_precisions
    missing = [precision for precision in inside if precision not in matmul_precisions]
    return [*sorted(_formats(name, device.kind) - set(device.formats)), *missing]


def _formats(name: str, device_kind: str) -> set[str]:
    return {"fp32", low_of(name)} if name in graph_preset_names() else used_formats(preset(name, device_kind))


def used_formats(policy: Policy) -> set[str]:
    """Return the formats that sites run in or parameters are stored in."""
    return {*policy.formats, policy.parameters.storage}


def coarsest_format(policy: Policy) -> str | None:
    """Return the format with the fewest significant bits that a policy rounds to; None for plain FP32.

    FP32 itself where other kernels than those of plain FP32 run: they sum in another order.
    """
    matmul = set(policy.matmul_precisions) - {"ieee"}
    rounded = sorted((used_formats(policy) | matmul) - {"fp32"})
    if rounded:
        return min(rounded, key=lambda name: format_named(name).precision)
    return "fp32" if any(getattr(policy, name) != AS_GIVEN for name in COMPANIONS) else None


def rounding_of(format_name: str) -> float:
    """Return the largest relative error of one rounding to a normal number of the format."""
    return float(2.0 ** -format_named(format_name).precision)
