"""A policy in the words of other tools: FSDP2's `MixedPrecisionPolicy` per module, and torchao's float8 module filter.

Both speak of whole modules, a policy of single sites, so an export says in sentences what of this policy it leaves out.
A recording (`autoprec.graph.uses`) makes it exact: then the sites that read a parameter say its format, and without one
the classes of modules do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.policy import FLOAT8, Policy, Scaling
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.unexpressed import more, rules_unexpressed, settings_unexpressed
from autoprec.runtime.used_parameters import UsedParameter, is_inside, units, used_parameters

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from autoprec.graph.uses import Uses

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_FLOAT8_MULTIPLE = 16  # of both dimensions of a weight; source: torch._scaled_mm


@dataclass(frozen=True, kw_only=True)
class FSDP2Export:
    """Modules to call `fully_shard(module, mp_policy=...)` on, in that order, and what they leave out of the policy."""

    policies: Mapping[str, "MixedPrecisionPolicy"]
    unexpressed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Float8Export:
    """What to give to `convert_to_float8_training`, the modules it chooses, and what that leaves out of the policy.

    `module_filter` is the `module_filter_fn`, `recipe` a name for `Float8LinearConfig.from_recipe_name`.
    """

    module_filter: Callable[[nn.Module, str], bool]
    modules: tuple[str, ...]
    recipe: Scaling
    unexpressed: tuple[str, ...]


def fsdp2_policies(model: nn.Module, policy: Policy, uses: "Uses | None" = None) -> FSDP2Export:
    """Return a `MixedPrecisionPolicy` for each module that FSDP2 should shard, children before parents, the root last.

    A module is one unit if all parameters below it are used in one format. Gradients are reduced in FP32.
    Raises: `PolicyError` if a module's parameters are used in a format that no torch dtype FSDP2 gathers in holds.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    parameters = used_parameters(model, policy, uses)
    for each in parameters:
        for name in sorted(each.formats - {"fp32", "bf16", "fp16"}):
            raise PolicyError(
                f'export of policy "{policy.name}" to fsdp2: module "{each.holders[0]}" runs in {name}; FSDP2 gathers '
                "parameters in fp32, bf16 or fp16; give that module one of these, or export to torchao-float8 for fp8"
            )
    gathered = list(units(model, parameters))
    policies = {
        path: MixedPrecisionPolicy(param_dtype=torch_dtype(name), reduce_dtype=torch_dtype("fp32"))
        for path, name, _ in gathered
    }
    root = policies.pop("", MixedPrecisionPolicy(param_dtype=torch_dtype("fp32"), reduce_dtype=torch_dtype("fp32")))
    policies[""] = replace(root, output_dtype=torch_dtype("fp32") if policy.outputs == "fp32" else None)
    formats = {each.name: name for _, name, inside in gathered for each in inside}
    unexpressed = (
        *_norms_in(model, parameters, formats),
        *_widened(parameters, formats),
        *_uncast(gathered),
        *settings_unexpressed(policy),
        *("float8: {scaling: rowwise}: FSDP2 multiplies nothing in fp8",) * (policy.float8.scaling == "rowwise"),
        *rules_unexpressed(model, policy, parameters, uses, all_fp32=set(formats.values()) <= {"fp32"}),
    )
    return FSDP2Export(policies=MappingProxyType(policies), unexpressed=unexpressed)


def float8_module_filter(model: nn.Module, policy: Policy, uses: "Uses | None" = None) -> Float8Export:
    """Return the filter that is true for the linears whose `linear` site runs in fp8_e4m3.

    A linear whose weight torch's float8 matmul cannot take is not chosen, and told.
    """
    parameters = used_parameters(model, policy, uses)
    faults = dict(_float8_faults(model, policy, parameters))
    chosen = tuple(path for path, fault in faults.items() if not fault)

    def module_filter(module: nn.Module, path: str) -> bool:
        return path in chosen and isinstance(module, nn.Linear)

    told = tuple(f'module "{path}" asks for {FLOAT8} and stays as it is: {why}' for path, why in faults.items() if why)
    low = sorted({name for each in parameters for name in each.formats if name not in (FLOAT8, "fp32")})
    others = (f"sites in {', '.join(low)}: the filter chooses float8 or nothing; keep apply() for these",) * bool(low)
    results = ("results of the chosen linears have the dtype of what they are given; apply() makes FP32 ones bf16",)
    unexpressed = (
        *told,
        *others,
        *results * bool(chosen),
        *settings_unexpressed(policy),
        *rules_unexpressed(model, policy, parameters, uses, all_fp32=True),
    )
    return Float8Export(
        module_filter=module_filter, modules=chosen, recipe=policy.float8.scaling, unexpressed=unexpressed
    )


def _norms_in(model: nn.Module, parameters: Sequence[UsedParameter], formats: Mapping[str, str]) -> Iterator[str]:
    gathered = {path: formats[each.name] for each in parameters for path in each.holders}
    low = [
        path
        for path, module in model.named_modules()
        if isinstance(module, _NORMS) and gathered.get(path, "fp32") != "fp32"
    ]
    if low:
        yield (
            f'norm parameters of "{low[0]}"{more(len(low) - 1)} are gathered in {gathered[low[0]]}; apply() keeps them '
            "as stored and casts the activation alone"
        )


def _widened(parameters: Sequence[UsedParameter], formats: Mapping[str, str]) -> Iterator[str]:
    """Yield the parameters that are gathered in another format than sites read them in."""
    kinds: dict[tuple[str, str], list[UsedParameter]] = {}
    for each in parameters:
        if each.formats != {formats[each.name]}:
            kinds.setdefault((" and ".join(sorted(each.formats)), formats[each.name]), []).append(each)
    for (used, name), found in kinds.items():
        readers = ", ".join(map(str, found[0].sites))
        yield (
            f'parameter "{found[0].name}"{more(len(found) - 1)}: used in {used} ({readers}) and gathered in {name}, '
            "since FSDP2 gathers a module in one dtype"
        )


def _uncast(gathered: Sequence[tuple[str, str, list[UsedParameter]]]) -> Iterator[str]:
    """Yield the modules that are gathered with one around them that has units of another format inside."""
    for path, name, inside in gathered:
        low = sorted({other for below, other, _ in gathered if is_inside(below, path)} - {name})
        held = list(dict.fromkeys(holder for each in inside for holder in each.holders))
        if low:
            yield (
                f"{_place(held[0])}{more(len(held) - 1)} is gathered with {_place(path)}: FSDP2 casts what comes into "
                f"a unit; cast what comes from units in {', '.join(low)} to {name} by hand"
            )


def _place(path: str) -> str:
    return f'module "{path}"' if path else "the root"


def _float8_faults(model: nn.Module, policy: Policy, parameters: Sequence[UsedParameter]) -> Iterator[tuple[str, str]]:
    """Yield each module that holds a parameter which sites read in FP8, and why torchao cannot do it: empty if it can.

    A tied parameter is left to the linear that reads it.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        held = [each for each in parameters if path in each.holders]
        wanted = {site for each in held for site in each.sites if policy.format_of(site)[0] == FLOAT8}
        others = {holder for each in held for holder in each.holders if isinstance(modules.get(holder), nn.Linear)}
        if {site for site in wanted if site.op != "linear" or site.module not in others - {path}}:
            yield path, _float8_fault(module, path, {site for each in held for site in each.sites})


def _float8_fault(module: nn.Module, path: str, sites: set[Site]) -> str:
    own = [site for site in sites if (site.module, site.op) == (path, "linear")]
    if not isinstance(module, nn.Linear):
        return "torchao exchanges nn.Linear and nothing else"
    if not own:
        return f"its weight is read by {min(sites)}, not by its own forward, which is all that torchao exchanges"
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own, which torchao would drop"
    if any(size % _FLOAT8_MULTIPLE for size in module.weight.shape):
        return f"its weight is {list(module.weight.shape)}, and float8 matmuls take multiples of {_FLOAT8_MULTIPLE}"
    return ""
