"""FP32, what torch itself does in low precision, and bf16 throughout, as policies."""

from dataclasses import replace

from autoprec.ops import CATALOG
from autoprec.policy.parameters import Parameters
from autoprec.policy.policy import AS_GIVEN, FLOAT8, PROMOTE, LossScale, MatmulPrecision, Policy, Rule

# The defaults of torch.amp.GradScaler, which has no bounds: these are the ends of what its fp32 scale can hold.
GRAD_SCALER = LossScale(
    kind="dynamic",
    initial=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    minimum=2.0**-126,
    maximum=2.0**127,
)


def fp32(device_kind: str) -> Policy:
    """Return FP32 everywhere: nothing is installed."""
    return Policy(name="fp32", device={"kind": device_kind}, rules=(Rule(sites="*", format="fp32"),))


def reduced_matmul(precision: MatmulPrecision, device_kind: str) -> Policy:
    """Return FP32 with `precision` inside matmuls and convolutions."""
    return replace(fp32(device_kind), name=f"fp32-matmul-{precision}", float32_matmul=precision)


def bf16_throughout(name: str, parameters: Parameters, why: str, device_kind: str) -> Policy:
    """Return bf16 at every site and for every parameter; `parameters` says what becomes of small updates."""
    return Policy(
        name=name,
        device={"kind": device_kind},
        parameters=parameters,
        outputs="computed",
        rules=(Rule(sites="*", format="bf16", why=why),),
    )


def float8_matmul(device_kind: str) -> Policy:
    """Return torch.autocast in bf16 with every `linear` in FP8."""
    linear = Rule(
        sites="*:linear",
        format=FLOAT8,
        why="a rule above this one keeps what matters, such as the first and the last layer, in bf16",
    )
    low = autocast("bf16", LossScale(), device_kind)
    return replace(low, name="fp8-matmul", rules=(linear, *(rule for rule in low.rules if rule.sites != linear.sites)))


def autocast(low: str, loss_scale: LossScale, device_kind: str) -> Policy:
    """Return torch.autocast's lists for a kind of device as rules, one an op."""
    formats = {"lower": low, "fp32": "fp32", "promote": PROMOTE}
    rules = [
        Rule(sites=f"*:{op.name}", format=formats[listed], why=f"torch.autocast list: {listed}")
        for wanted in formats
        for op in CATALOG.values()
        if op.is_site and (listed := op.autocast.get(device_kind)) == wanted
    ]
    rules.append(Rule(sites="*", format=AS_GIVEN, why="on no list of torch.autocast"))
    return Policy(
        name=f"autocast-{low}",
        device={"kind": device_kind},
        loss_scale=loss_scale,
        outputs="computed",
        rules=tuple(rules),
    )
