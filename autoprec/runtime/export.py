"""A policy in the words of other tools: FSDP2's `MixedPrecisionPolicy` per module, and torchao's float8 module filter.

Both speak of whole modules, a policy of single sites, so an export says in sentences what of this policy it leaves out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from autoprec.errors import PolicyError
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.policy import INSIDE_FP32, Policy, Rule, SitePattern
from autoprec.runtime.dtypes import torch_dtype

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# The site that uses the parameters of a module, by the module's class.
_MAIN_OPS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Linear, "linear"),
    (nn.Bilinear, "bilinear"),
    (nn.Embedding, "embedding"),
    (nn.EmbeddingBag, "embedding_bag"),
    (nn.LayerNorm, "layer_norm"),
    (nn.RMSNorm, "rms_norm"),
    (nn.GroupNorm, "group_norm"),
    (nn.modules.batchnorm._BatchNorm, "batch_norm"),
    (nn.PReLU, "prelu"),
    (nn.LSTM, "lstm"),
    (nn.GRU, "gru"),
    *((getattr(nn, f"Conv{n}d"), f"conv{n}d") for n in (1, 2, 3)),
    *((getattr(nn, f"ConvTranspose{n}d"), f"conv_transpose{n}d") for n in (1, 2, 3)),
)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_FLOAT8 = "fp8_e4m3"
_FLOAT8_MULTIPLE = 16  # of both dimensions of a weight; source: torch._scaled_mm


@dataclass(frozen=True, kw_only=True)
class FSDP2Export:
    """Modules to call `fully_shard(module, mp_policy=...)` on, in that order, and what they leave out of the policy."""

    policies: Mapping[str, "MixedPrecisionPolicy"]
    unexpressed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Float8Export:
    """The `module_filter_fn` of `convert_to_float8_training`, the modules it chooses, and what it leaves out."""

    module_filter: Callable[[nn.Module, str], bool]
    modules: tuple[str, ...]
    unexpressed: tuple[str, ...]


def fsdp2_policies(model: nn.Module, policy: Policy) -> FSDP2Export:
    """Return a `MixedPrecisionPolicy` for each module that FSDP2 should shard, children before parents, the root last.

    A module is one unit if all parameters below it are used in one format. Gradients are reduced in FP32.
    Raises: `PolicyError` if a module's parameters are used in a format that no torch dtype FSDP2 gathers in holds.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    formats = dict(_formats(model, policy))
    for path, name in formats.items():
        if name not in ("fp32", "bf16", "fp16"):
            raise PolicyError(
                f'export of policy "{policy.name}" to fsdp2: module "{path}" runs in {name}; FSDP2 gathers parameters '
                "in fp32, bf16 or fp16; give that module one of these, or export to torchao-float8 for fp8"
            )
    units = dict(_units(model, "", formats))
    root = units.pop("", "fp32")
    policies = {}
    for path, name in (*units.items(), ("", root)):
        output = torch_dtype("fp32") if path == "" and policy.outputs == "fp32" else None
        policies[path] = MixedPrecisionPolicy(
            param_dtype=torch_dtype(name), reduce_dtype=torch_dtype("fp32"), output_dtype=output
        )
    unexpressed = (*_norms_in(model, formats), *_settings(policy), *_rules(model, policy, formats))
    return FSDP2Export(policies=MappingProxyType(policies), unexpressed=unexpressed)


def float8_module_filter(model: nn.Module, policy: Policy) -> Float8Export:
    """Return the filter that is true for the linears whose `linear` site runs in fp8_e4m3.

    A linear whose weight torch's float8 matmul cannot take is not chosen, and told.
    """
    formats = dict(_formats(model, policy))
    wanted = {path: module for path, module in model.named_modules() if formats.get(path) == _FLOAT8}
    unfit = {path: _unfit(module) for path, module in wanted.items() if _unfit(module)}
    chosen = tuple(path for path in wanted if path not in unfit)

    def module_filter(module: nn.Module, path: str) -> bool:
        return path in chosen and isinstance(module, nn.Linear)

    told = tuple(f'module "{path}" asks for {_FLOAT8} and stays as it is: {why}' for path, why in unfit.items())
    low = sorted({name for name in formats.values() if name not in (_FLOAT8, "fp32")})
    others = (f"sites in {', '.join(low)}: the filter chooses float8 or nothing; keep apply() for these",) * bool(low)
    gradients = (
        "gradients of the chosen linears are cast as Float8LinearConfig says, which the policy has no rule for",
    )
    unexpressed = (*told, *others, *gradients * bool(chosen), *_settings(policy), *_rules(model, policy, formats))
    return Float8Export(module_filter=module_filter, modules=chosen, unexpressed=unexpressed)


def _formats(model: nn.Module, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield each module that has parameters of its own, and the format of the site that uses them."""
    for path, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            name = policy.format_of(Site(path, _main_op(module) or "unknown", 0))[0]
            yield path, "fp32" if name in ("as_given", "promote", *INSIDE_FP32) else name  # as stored


def _main_op(module: nn.Module) -> str | None:
    return next((op for kind, op in _MAIN_OPS if isinstance(module, kind)), None)


def _units(module: nn.Module, path: str, formats: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the outermost modules below which all formats agree, children first."""
    below = {name for each, name in formats.items() if path in ("", each) or each.startswith(path + ".")}
    if len(below) == 1 and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # these have no forward to hook
        yield path, below.pop()
        return
    for name, child in module.named_children():
        yield from _units(child, f"{path}.{name}" if path else name, formats)
    if path in formats:
        yield path, formats[path]


def _norms_in(model: nn.Module, formats: Mapping[str, str]) -> Iterator[str]:
    low = [
        path
        for path, module in model.named_modules()
        if isinstance(module, _NORMS) and formats.get(path, "fp32") != "fp32"
    ]
    if low:
        yield (
            f'norm parameters of "{low[0]}"{_more(len(low) - 1)} are gathered in {formats[low[0]]}; apply() keeps them '
            "as stored and casts the activation alone"
        )


def _unfit(module: nn.Module) -> str:
    assert isinstance(module, nn.Linear)  # only its main op takes the format
    if any(size % _FLOAT8_MULTIPLE for size in module.weight.shape):
        return f"its weight is {list(module.weight.shape)}, and float8 matmuls take multiples of {_FLOAT8_MULTIPLE}"
    return ""


def _settings(policy: Policy) -> Iterator[str]:
    """Yield what the policy says beside its rules."""
    if policy.float32_matmul != "ieee":
        yield f"float32_matmul: {policy.float32_matmul}: set torch.backends.*.fp32_precision by hand"
    if policy.loss_scale.kind != "none":
        scale = policy.loss_scale
        yield f"loss_scale: {scale.kind}, initial {scale.initial:g}: use torch.amp.GradScaler by hand"
    if policy.parameters.storage != "fp32":
        yield f"parameters: stored in {policy.parameters.storage}: convert the model by hand before it is sharded"


def _rules(model: nn.Module, policy: Policy, formats: Mapping[str, str]) -> Iterator[str]:
    """Yield the rules whose sites are not the ones that use a module's parameters, those alike in one sentence."""
    modules = dict(model.named_modules())
    alike: dict[tuple[str, str], list[str]] = {}
    for rule in policy.rules[:-1]:
        reason = _unexpressed(rule, modules, policy, formats)
        if reason:
            alike.setdefault((rule.format, reason), []).append(rule.sites)
    for (name, reason), sites in alike.items():
        rules = f'rule "{sites[0]}"' if len(sites) == 1 else f'{len(sites)} rules such as "{sites[0]}"'
        yield f"{rules} ({name}): {reason}"
    last = policy.rules[-1]
    caught = len(policy.rules) - 1
    bare = [path for path in modules if path not in formats and policy.format_of(Site(path, "add", 0))[1] == caught]
    if bare and last.format != "fp32":
        place = f'"{bare[0]}"' if bare[0] else "the root"
        yield (
            f'rule "{last.sites}" ({last.format}) covers functional ops too, as in {place}{_more(len(bare) - 1)}: '
            "they run in whatever dtype reaches them"
        )


def _unexpressed(rule: Rule, modules: Mapping[str, nn.Module], policy: Policy, formats: Mapping[str, str]) -> str:
    """Return why an export cannot say what `rule` does; empty if it can."""
    pattern, matched = SitePattern(rule.sites), []
    if "#" in rule.sites:
        return "it tells the calls of one op in a module apart; an export speaks of whole modules"
    if rule.sites.startswith(LOSS_MODULE):
        return "it is about loss code, which is in no module"
    if rule.format in ("as_given", "promote"):
        return "it has no counterpart: an export names dtypes"
    if rule.format in INSIDE_FP32:
        return "the precision inside FP32 matmuls is a setting of torch; set torch.backends.*.fp32_precision by hand"
    for path, module in modules.items():
        op = _main_op(module)
        if path in formats and op and pattern.matches(Site(path, op, 0)) and formats[path] == rule.format:
            matched.append(path)
    if matched:
        return ""
    if ":" not in rule.sites and not any(pattern.matches_module(path) for path in formats):
        return "its modules have no parameters; their ops run in whatever dtype reaches them"
    op = rule.sites.partition(":")[2]
    won = any(policy.rules[policy.format_of(Site(path, op or "linear", 0))[1]] is rule for path in modules)
    return (
        "it is about ops inside modules, not about the parameters of one; they run in what reaches them" if won else ""
    )


def _more(count: int) -> str:
    return f" and {count} more" if count else ""
