"""What FP32 costs at the sites of a rule: the predicted step with them in FP32 beside that with them low, casts too."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autoprec.graph.site import Site
from autoprec.policy import AS_GIVEN, FLOAT8, INSIDE_FP32, Policy, resolve
from autoprec.search.cost_model import CostModel

_PLAIN = frozenset({"fp32", AS_GIVEN, "promote", FLOAT8, *INSIDE_FP32})


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Predicted step times of assignments; `model` is calibrated on the FP32 step, None where nothing was timed."""

    model: CostModel | None

    def step_s(self, formats: Mapping[Site, str], settings: Policy) -> float | None:
        """Return the predicted step time; None where ops were not timed in a format or under a setting."""
        is_plain = settings.memory_format == settings.compile == AS_GIVEN and settings.float32_matmul == "ieee"
        if self.model is None or not is_plain:
            return None
        if not set(formats.values()) <= {"fp32", "as_given", "promote", *self.model.op_times.formats}:
            return None
        return self.model.predict(formats, outputs=settings.outputs).step_s

    def frac(self, formats: Mapping[Site, str], settings: Policy, sites: Collection[Site], low: str) -> float | None:
        """Return the part of a step that FP32 takes at `sites`; negative where the format would take longer."""
        fp32_s = self.step_s(formats, settings)
        low_s = self.step_s({**formats, **dict.fromkeys(sites, low)}, settings)
        return None if fp32_s is None or low_s is None else (fp32_s - low_s) / fp32_s


def priced(policy: Policy, sites: Collection[Site], prices: Prices) -> Policy:
    """Return the policy, each FP32 rule of which says what it costs, as far as that can be predicted."""
    resolved = resolve(policy, sites)
    lows = set(resolved.formats.values()) - _PLAIN
    if len(lows) != 1:
        return policy
    (low,) = lows
    rules = []
    for rule, own in zip(policy.rules, resolved.sites_of_rule, strict=True):
        frac = prices.frac(resolved.formats, policy, own, low) if own and rule.format == "fp32" else None
        parts = (rule.why, "" if frac is None else price_text(frac, low))
        rules.append(replace(rule, why="; ".join(part for part in parts if part)))
    return replace(policy, rules=tuple(rules))


def price_text(frac: float, low: str) -> str:
    """Return what FP32 costs at some sites, in words."""
    if frac >= 0:
        return f"fp32 here costs {100 * frac:.2g} % of step time, predicted"
    return f"{low} here would cost {-100 * frac:.2g} % of step time, predicted"
