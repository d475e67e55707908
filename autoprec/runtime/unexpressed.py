"""What a policy says and an export of it cannot: one sentence each."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.policy import AS_GIVEN, INSIDE_FP32, Policy, Rule, SitePattern
from autoprec.runtime.used_parameters import UsedParameter

if TYPE_CHECKING:
    from autoprec.graph.uses import Uses

_COMPANION_REMEDIES = {
    "memory_format": "lay the model out by hand, FSDP2 cannot",
    "optimizer": "build the optimizer with fused=True",
    "compile": "call torch.compile by hand, after fully_shard",
}
_REACHES = "run in whatever dtype reaches them"


def settings_unexpressed(policy: Policy) -> Iterator[str]:
    """Yield what the policy says beside its rules."""
    if policy.float32_matmul != "ieee":
        yield f"float32_matmul: {policy.float32_matmul}: set torch.backends.*.fp32_precision by hand"
    if policy.loss_scale.kind != "none":
        scale = policy.loss_scale
        yield f"loss_scale: {scale.kind}, initial {scale.initial:g}: use torch.amp.GradScaler by hand"
    for name, remedy in _COMPANION_REMEDIES.items():
        if getattr(policy, name) != AS_GIVEN:
            yield f"{name}: {getattr(policy, name)}: {remedy}"
    stored = policy.parameters
    if stored.storage != "fp32":
        yield f"parameters.storage: {stored.storage}: convert the model by hand first"
    if stored.keep:
        yield f"parameters.keep: {', '.join(stored.keep)}: leave these in FP32 when you convert the model"
    if stored.batch_norm != "storage":
        yield f"parameters.batch_norm: {stored.batch_norm}: leave batch norms in FP32 when you convert the model"
    if stored.master != "none":
        yield f"parameters.master: {stored.master}: step on FP32 copies of the parameters by hand"
    if stored.rounding != "nearest":
        yield f"parameters.rounding: {stored.rounding}: use an optimizer that rounds so, as those of torchao.optim can"
    if stored.gradients != "fp32":
        yield f"parameters.gradients: {stored.gradients}: see to the dtype of accumulated gradients by hand"
    if stored.optimizer_state != "fp32":
        yield f"parameters.optimizer_state: {stored.optimizer_state}: use an optimizer of torchao.optim by hand"


def rules_unexpressed(
    model: nn.Module, policy: Policy, parameters: Sequence[UsedParameter], uses: "Uses | None", *, all_fp32: bool
) -> Iterator[str]:
    """Yield the rules that are about other sites than those that read parameters, those alike in one sentence.

    With a recording, a rule is told only where it wins. `all_fp32` says that sites without parameters run in FP32.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for index, rule in enumerate(policy.rules):
        reasons = (
            _reasons(index, model, policy, parameters, all_fp32=all_fp32)
            if uses is None
            else _recorded_reasons(index, policy, parameters, uses, all_fp32=all_fp32)
        )
        for reason in reasons:
            alike.setdefault((rule.format, reason), []).append(rule.sites)
    for (name, reason), sites in alike.items():
        rules = f'rule "{sites[0]}"' if len(sites) == 1 else f'{len(sites)} rules such as "{sites[0]}"'
        yield f"{rules} ({name}): {reason}"


def more(count: int) -> str:
    """Return words for `count` things that are not named."""
    return f" and {count} more" if count else ""


def _format_reason(rule: Rule) -> str:
    """Return why no site can have the rule's format; empty if it can."""
    if rule.format in ("as_given", "promote"):
        return "it has no counterpart: an export names dtypes"
    if rule.format in INSIDE_FP32:
        return "the precision inside FP32 matmuls is a setting of torch; set torch.backends.*.fp32_precision by hand"
    return ""


def _recorded_reasons(
    index: int, policy: Policy, parameters: Sequence[UsedParameter], uses: "Uses", *, all_fp32: bool
) -> Iterator[str]:
    rule = policy.rules[index]
    won = [site for site in uses.sites if policy.format_of(site)[1] == index]
    reason = _format_reason(rule)
    if reason:
        if won:
            yield reason
        return
    readers = {site for each in parameters for site in each.sites}
    loss = [site for site in won if site.module == LOSS_MODULE]
    inner = [site for site in won if site.module != LOSS_MODULE and site not in readers and site not in uses.as_stored]
    if loss and not (rule.format == "fp32" and policy.outputs == "fp32"):
        yield f"it covers loss code, as {loss[0]}{more(len(loss) - 1)}: that runs in the dtype of the model's outputs"
    if inner and not (rule.format == "fp32" and all_fp32):
        yield f"it covers sites that read no parameters, as {inner[0]}{more(len(inner) - 1)}: they {_REACHES}"


def _reasons(
    index: int, model: nn.Module, policy: Policy, parameters: Sequence[UsedParameter], *, all_fp32: bool
) -> Iterator[str]:
    modules = [path for path, _ in model.named_modules()]
    holders = {path for each in parameters for path in each.holders}
    rule = policy.rules[index]
    if index < len(policy.rules) - 1:
        reason = _reason(rule, modules, holders, policy, parameters)
        if reason:
            yield reason
        return
    if _format_reason(rule):
        yield _format_reason(rule)
        return
    bare = [path for path in modules if path not in holders and policy.format_of(Site(path, "add", 0))[1] == index]
    if bare and not (rule.format == "fp32" and all_fp32):
        place = f'"{bare[0]}"' if bare[0] else "the root"
        yield f"it covers functional ops too, as in {place}{more(len(bare) - 1)}: they {_REACHES}"


def _reason(
    rule: Rule, modules: Sequence[str], holders: set[str], policy: Policy, parameters: Sequence[UsedParameter]
) -> str:
    """Return why an export cannot say what `rule` does; empty if it can."""
    pattern = SitePattern(rule.sites)
    if "#" in rule.sites:
        return "it tells the calls of one op in a module apart; an export speaks of whole modules"
    if rule.sites.startswith(LOSS_MODULE):
        return "it is about loss code, which is in no module"
    if _format_reason(rule):
        return _format_reason(rule)
    if any(each.format == rule.format and any(pattern.matches(site) for site in each.sites) for each in parameters):
        return ""
    if ":" not in rule.sites and not any(pattern.matches_module(path) for path in holders):
        return f"its modules have no parameters; their ops {_REACHES}"
    op = rule.sites.partition(":")[2]
    won = any(policy.rules[policy.format_of(Site(path, op or "linear", 0))[1]] is rule for path in modules)
    return f"it is about ops inside modules, not about the parameters of one; they {_REACHES}" if won else ""
