"""Other policies made of a policy: one site in FP32, one parameter stored in FP32, or its fallback. No torch."""

from dataclasses import replace

from autoprec.policy import LossScale, Parameters, Policy, Rule


def with_fp32_at(policy: Policy, sites: str, why: str) -> Policy:
    """Return `policy` with a first rule that keeps `sites` in FP32."""
    return replace(policy, rules=(Rule(sites=sites, format="fp32", why=why), *policy.rules))


def with_fp32_parameter(policy: Policy, name: str) -> Policy:
    """Return `policy` with the parameter `name` stored in FP32."""
    return replace(policy, parameters=replace(policy.parameters, keep=(*policy.parameters.keep, name)))


def fallback_of(policy: Policy) -> Policy:
    """Return what `policy` falls back to: its fallback rule everywhere, parameters in FP32, plain FP32 matmuls.

    The loss is scaled on only if the fallback runs in fp16. The optimizer's state stays in the format that it has.
    """
    rule = policy.fallback
    rest = () if rule.sites == "*" else (Rule(sites="*", format="fp32"),)
    return replace(
        policy,
        rules=(rule, *rest),
        parameters=Parameters(optimizer_state=policy.parameters.optimizer_state),
        float32_matmul="ieee",
        loss_scale=policy.loss_scale if rule.format == "fp16" else LossScale(),
    )


def is_fallen_back(policy: Policy) -> bool:
    """Return whether falling back would change nothing."""
    return replace(fallback_of(policy), evidence={}) == replace(policy, evidence={})
