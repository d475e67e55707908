"""`apply`: install a policy in a module, in place and reversibly."""

import difflib
from os import PathLike, fspath
from pathlib import Path

import torch
from torch import nn

from autoprec.errors import ApplyError, a_or_an
from autoprec.graph.site import LOSS_MODULE
from autoprec.policy import Policy, SitePattern, hint_of_op, policy_or_preset, rule_lines
from autoprec.runtime.forwards import is_replaced
from autoprec.runtime.precision import APPLIED, Precision
from autoprec.runtime.wrappers import check_wrappers


def apply(model: nn.Module, policy: Policy | str | PathLike[str]) -> Precision:
    """Install `policy` in `model`, in place, and return the handle that takes it back.

    `policy` is a `Policy`, a policy file, or the name of a preset. Call it before the optimizer is built: the
    policy may change the dtype in which parameters are stored, and their layout. A policy of fp32 alone replaces no
    forward.

    Raises: `ApplyError` if the model has a policy already, or if a rule names modules that the model lacks;
    `DeviceError` for a precision that changes nothing on the device; whatever `load_policy` raises.
    """
    _check_model(model)
    device = next((tensor.device.type for tensor in model.parameters()), "cpu")
    given, policy = policy, _policy(policy, device)
    _check_scaling(policy)
    _check_modules(policy, model, None if isinstance(given, Policy) or not Path(given).exists() else fspath(given))
    precision = Precision(model, policy, device)
    try:
        precision.install()
    except BaseException:
        precision.remove()
        raise
    return precision


def _policy(policy: Policy | str | PathLike[str], device: str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, (str, PathLike)):
        raise ApplyError(
            f"apply: the policy is {policy!r}; allowed: a policy file, the name of a preset, or an autoprec.Policy"
        )
    return policy_or_preset(policy, device)


def _check_model(model: nn.Module) -> None:
    """Refuse a model that no policy can be installed in, or not again."""
    if not isinstance(model, nn.Module):
        raise ApplyError(f"apply: the model is {a_or_an(model)}; write apply(model, policy) with a torch.nn.Module")
    for path, module in model.named_modules():
        if is_replaced(module) or APPLIED in module.__dict__:
            found = module.__dict__.get(APPLIED)
            name = "a policy" if found is None else f'policy "{found.policy.name}"'
            raise ApplyError(
                f"apply: {f'module {path}' if path else 'the model'} already runs {name}; "
                "call remove() on the Precision that apply() returned first"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ApplyError(
                f'apply: module "{path}" is a TorchScript module, whose ops cannot be cast from outside; '
                "apply the policy to the model before it is scripted or traced"
            )
    check_wrappers(model)
    if any(tensor.is_meta for tensor in model.parameters()):
        raise ApplyError("apply: the model is on the meta device; move it to the device it trains on first")


def _check_scaling(policy: Policy) -> None:
    """Refuse to scale the loss where gradients are fp16, which no scaler unscales."""
    parameters = policy.parameters
    fp16_gradients = parameters.storage == "fp16" and (
        not parameters.steps_in_fp32 or parameters.gradients == "storage"
    )
    if fp16_gradients and policy.loss_scale.kind != "none":
        raise ApplyError(
            f'apply: policy "{policy.name}" stores parameters and gradients in fp16 and scales the loss, and '
            "torch.amp.GradScaler does not unscale fp16 gradients; use parameters: {storage: fp16, master: fp32} or "
            "{storage: fp32} with it, or loss_scale: none"
        )


def _check_modules(policy: Policy, model: nn.Module, file: str | None) -> None:
    """Refuse a rule, of `file` if it has one, that names modules the model lacks: of another model, or with a typo."""
    paths = [LOSS_MODULE, *(path for path, _ in model.named_modules())]
    for index, rule in enumerate(policy.rules):
        pattern = SitePattern(rule.sites)
        if not any(pattern.matches_module(path) for path in paths):
            near = difflib.get_close_matches(rule.sites.split(":")[0], paths[1:], n=3, cutoff=0.4)
            what = "nearest modules" if near else "its modules"
            names = ", ".join(f'"{name}"' for name in near or [path for path in paths[1:] if path][:5]) or "none"
            raise ApplyError(
                f"{f'{file}:{rule_lines(file)[index]}' if file else 'apply'}: "
                f'rule "{rule.sites}" of policy "{policy.name}" matches no module of this '
                f"{type(model).__name__}; {what}: {names}{hint_of_op(rule.sites)}; "
                "mend the rule, or tune this model anew"
            )
