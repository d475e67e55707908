"""Policies nobody searched for: the baselines that every search has to beat."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from autoprec.errors import PolicyError
from autoprec.ops import CATALOG
from autoprec.policy.parameters import Parameters
from autoprec.policy.policy import AS_GIVEN, FLOAT8, PROMOTE, LossScale, MatmulPrecision, Policy, Rule

# Reduced precisions inside FP32 matmuls that torch.backends offers, by device kind.
_MATMUL_PRECISIONS: Mapping[str, tuple[MatmulPrecision, ...]] = MappingProxyType({"cpu": ("bf16",), "cuda": ("tf32",)})

_AUTOCAST_KINDS = frozenset(kind for op in CATALOG.values() for kind in op.autocast)
_DEVICE_KINDS = ("cpu", "cuda", "mps")
_FLOAT8_KINDS = ("cpu", "cuda")  # emulated where the device has no FP8 kernels

# The defaults of torch.amp.GradScaler, which has no bounds: these are the ends of what its fp32 scale can hold.
_GRAD_SCALER = LossScale(
    kind="dynamic",
    initial=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    minimum=2.0**-126,
    maximum=2.0**127,
)

# bf16 throughout, by what becomes of a step that is small beside the weight: lost, kept, or kept on average.
_BF16_THROUGHOUT: Mapping[str, tuple[Parameters, str]] = MappingProxyType(
    {
        "low-bf16": (Parameters(storage="bf16"), "as model.to(torch.bfloat16)"),
        "bf16-master": (Parameters(storage="bf16", master="fp32"), "bf16 throughout with FP32 master weights"),
        "bf16-stochastic": (
            Parameters(storage="bf16", rounding="stochastic"),
            "bf16 throughout, steps rounded stochastically",
        ),
    }
)


def preset_names(device_kind: str) -> tuple[str, ...]:
    """Return the names of the presets there are for a kind of device (cpu, cuda, mps)."""
    return tuple(_presets(device_kind))


def preset(name: str, device_kind: str) -> Policy:
    """Return the preset called `name` for a kind of device (cpu, cuda, mps).

    The autocast presets state torch's lists for that device as rules, one an op.

    Raises: `PolicyError` if there is no such preset for that kind of device; the message lists those there are.
    """
    presets = _presets(device_kind)
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=1, cutoff=0.5)
        hint = f'; nearest: "{near[0]}"' if near else ""
        raise PolicyError(f'"{name}" is not a preset for {device_kind}; presets: {", ".join(presets)}{hint}')
    return presets[name]()


def _presets(device_kind: str) -> dict[str, Callable[[], Policy]]:
    if device_kind not in _DEVICE_KINDS:
        raise PolicyError(f'presets for device kind "{device_kind}"; device kinds: {", ".join(_DEVICE_KINDS)}')
    presets: dict[str, Callable[[], Policy]] = {"fp32": lambda: _uniform("fp32", "fp32", device_kind)}
    for precision in _MATMUL_PRECISIONS.get(device_kind, ()):
        name = f"fp32-matmul-{precision}"
        presets[name] = partial(_reduced_matmul, name, precision, device_kind)
    if device_kind in _AUTOCAST_KINDS:
        presets["autocast-bf16"] = lambda: _autocast("bf16", LossScale(), device_kind)
        presets["autocast-fp16"] = lambda: _autocast("fp16", _GRAD_SCALER, device_kind)
    if device_kind in _FLOAT8_KINDS:
        presets["fp8-matmul"] = lambda: _float8_matmul(device_kind)
    for name, (parameters, why) in _BF16_THROUGHOUT.items():
        presets[name] = partial(_bf16_throughout, name, parameters, why, device_kind)
    return presets


def _uniform(name: str, fmt: str, device_kind: str) -> Policy:
    return Policy(name=name, device={"kind": device_kind}, rules=(Rule(sites="*", format=fmt),))


def _reduced_matmul(name: str, precision: MatmulPrecision, device_kind: str) -> Policy:
    return Policy(
        name=name,
        device={"kind": device_kind},
        float32_matmul=precision,
        rules=(Rule(sites="*", format="fp32"),),
    )


def _bf16_throughout(name: str, parameters: Parameters, why: str, device_kind: str) -> Policy:
    return Policy(
        name=name,
        device={"kind": device_kind},
        parameters=parameters,
        outputs="computed",
        rules=(Rule(sites="*", format="bf16", why=why),),
    )


def _float8_matmul(device_kind: str) -> Policy:
    linear = Rule(
        sites="*:linear",
        format=FLOAT8,
        why="a rule above this one keeps what matters, such as the first and the last layer, in bf16",
    )
    low = _autocast("bf16", LossScale(), device_kind)
    return replace(low, name="fp8-matmul", rules=(linear, *(rule for rule in low.rules if rule.sites != linear.sites)))


def _autocast(low: str, loss_scale: LossScale, device_kind: str) -> Policy:
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
