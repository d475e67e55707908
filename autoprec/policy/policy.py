"""The policy: which site runs in which format, and what goes with it. A frozen value without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from autoprec.errors import FormatError, PolicyError
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS, format_named
from autoprec.ops import CATALOG, FLOAT8_OPS
from autoprec.policy.checks import check_choice, check_kind, check_text
from autoprec.policy.parameters import Parameters
from autoprec.policy.pattern import SitePattern

MatmulPrecision: TypeAlias = Literal["ieee", "tf32", "bf16"]
Outputs: TypeAlias = Literal["fp32", "computed"]
MemoryFormat: TypeAlias = Literal["as_given", "channels_last"]
OptimizerKernels: TypeAlias = Literal["as_given", "fused"]
Compilation: TypeAlias = Literal["as_given", "inductor"]
LossScaleKind: TypeAlias = Literal["none", "static", "dynamic"]
Scaling: TypeAlias = Literal["tensorwise", "rowwise"]

AS_GIVEN = "as_given"
# Settings that go with a policy and say nothing about formats; `as_given` leaves things as they are.
COMPANIONS = ("memory_format", "optimizer", "compile")
PROMOTE = "promote"
# Formats of sites that compute on FP32 tensors: the precision inside their matmuls, convolutions and RNNs.
INSIDE_FP32: Mapping[str, MatmulPrecision] = MappingProxyType(
    {"tf32": "tf32", "fp32_bf16": "bf16", "fp32_ieee": "ieee"}
)
FLOAT8 = "fp8_e4m3"
_GRADIENTS_ONLY = "fp8_e5m2"
_OTHERS = ("fp32_bf16", "fp32_ieee", AS_GIVEN, PROMOTE)
RULE_FORMATS: tuple[str, ...] = (*(name for name in FORMATS if name != _GRADIENTS_ONLY), *_OTHERS)

_DEVICE_KEYS = ("kind", "name")


def _rebuilt(state: dict[str, Any]) -> "Policy":
    return Policy(**state)


def _tuple_of_rules(name: str, rules: Any) -> "tuple[Rule, ...]":
    if not isinstance(rules, (tuple, list)):
        raise PolicyError(f'policy "{name}": rules is {rules!r}; allowed: a tuple of autoprec.Rule')
    for index, rule in enumerate(rules):
        check_kind(f'policy "{name}": rules[{index}]', rule, Rule)
    return tuple(rules)


def _check_rules(name: str, rules: "tuple[Rule, ...]") -> None:
    if not rules or not SitePattern(rules[-1].sites).catches_all:
        last = f'its last rule is "{rules[-1].sites}"' if rules else "it has no rules"
        raise PolicyError(
            f'policy "{name}": {last}; the last rule must catch every site: add {{sites: "*", format: fp32}}'
        )


def _check_float8(pattern: SitePattern, format_name: str) -> None:
    """Refuse FP8 where no kernel multiplies in it: a rule must name the ops that it is for."""
    if format_name == _GRADIENTS_ONLY:
        raise PolicyError(
            f'rule "{pattern.text}": {_GRADIENTS_ONLY} is no format of a site, since matmuls in {FLOAT8} round their '
            f"gradients as torchao does; write {FLOAT8}"
        )
    others = [
        name for name, op in CATALOG.items() if op.is_site and name not in FLOAT8_OPS and pattern.matches_op(name)
    ]
    if format_name == FLOAT8 and others:
        raise PolicyError(
            f'rule "{pattern.text}": {FLOAT8} is for {", ".join(FLOAT8_OPS)}, and the rule names {others[0]} '
            f'too; name the op, as in "{pattern.text.partition(":")[0]}:linear"'
        )


def _check_range(name: str, value: float, allowed: str, *, inside: bool) -> None:
    if not inside:
        raise PolicyError(f"loss_scale.{name} is {value:g}; allowed: {allowed}")


def _finite(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PolicyError(f"{what} is {value!r}; allowed: finite numbers")
    return float(value)


def _frozen(where: str, value: object) -> Any:
    """Return `value` with tuples for lists and read-only views for mappings, so that equal policies stay equal."""
    if isinstance(value, Mapping):
        for key in value:
            check_text(f"a key of {where}", key)
        return MappingProxyType({key: _frozen(f"{where}.{key}", item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_frozen(f"{where}[{index}]", item) for index, item in enumerate(value))
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise PolicyError(f"{where} is {value!r}; allowed: text, numbers, booleans, None, and lists and mappings of these")


def _thawed(value: Any) -> Any:
    """Return `value` with plain mappings, which pickle."""
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    return tuple(_thawed(item) for item in value) if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Sites that match the anchored glob `sites` run in `format`; `why` is for people.

    `format` may also be `as_given`, the site is not cast at all, or `promote`, it is cast to the widest floating
    dtype among its arguments. `tf32`, `fp32_bf16` and `fp32_ieee` compute on fp32 tensors with TF32, bf16 or plain FP32
    inside matmuls, convolutions and RNNs, whatever `float32_matmul` says. `fp8_e4m3` multiplies in FP8, see `Float8`.

    Raises: `PolicyError` if the pattern or the format is none, or if an fp8 rule names ops that are no matrix product.
    """

    sites: str
    format: str
    why: str = ""

    def __post_init__(self) -> None:
        """Check the three fields."""
        for name in ("sites", "format", "why"):
            check_text(f"rule field {name}", getattr(self, name))
        pattern = SitePattern(self.sites)
        if self.format in _OTHERS:
            return
        try:
            format_named(self.format)
        except FormatError as error:
            raise PolicyError(f'rule "{self.sites}": {error}; or {", ".join(_OTHERS)}') from error
        if self.format.startswith("fp8"):
            _check_float8(pattern, self.format)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Factor on the loss before the backward pass, so that small gradients survive rounding.

    `static` keeps `initial`; `dynamic` halves it on overflow and doubles it after `growth_interval` clean steps,
    within [`minimum`, `maximum`]. Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2.

    Raises: `PolicyError` if a field is out of range.
    """

    kind: LossScaleKind = "none"
    initial: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        """Check ranges; whole numbers become floats where the field is one."""
        check_choice("loss_scale.kind", self.kind, get_args(LossScaleKind))
        for name in ("initial", "growth_factor", "backoff_factor", "minimum", "maximum"):
            object.__setattr__(self, name, _finite(f"loss_scale.{name}", getattr(self, name)))
        if type(self.growth_interval) is not int or self.growth_interval < 1:
            raise PolicyError(f"loss_scale.growth_interval is {self.growth_interval!r}; allowed: whole numbers from 1")
        _check_range("growth_factor", self.growth_factor, "numbers above 1", inside=self.growth_factor > 1)
        backs_off = 0 < self.backoff_factor < 1
        _check_range("backoff_factor", self.backoff_factor, "numbers between 0 and 1", inside=backs_off)
        _check_range("minimum", self.minimum, "positive numbers", inside=self.minimum > 0)
        inside = self.minimum <= self.initial <= self.maximum
        allowed = f"minimum ({self.minimum:g}) to maximum ({self.maximum:g})"
        _check_range("initial", self.initial, allowed, inside=inside)


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8:
    """How FP8 matmuls scale their operands: with one factor a tensor (`tensorwise`) or a row (`rowwise`).

    Factors follow the largest magnitude of each call (dynamic scaling), as torchao's recipe of that name does:
    tensorwise has e4m3 operands and e5m2 gradients; rowwise has e4m3 for both, and factors that are powers of two.

    Raises: `PolicyError` if there is no such scaling.
    """

    scaling: Scaling = "tensorwise"

    def __post_init__(self) -> None:
        """Check the scaling."""
        check_choice("float8.scaling", self.scaling, get_args(Scaling))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """An ordered list of rules, first match wins, and the settings that go with it.

    `rules` must end with one that catches every site (`*`). `outputs` says whether the root module hands its
    results back in fp32 or as they were computed. `float32_matmul` is the precision inside FP32 matmuls.
    `memory_format` is the layout of parameters with 4 or 5 dimensions, the weights of convolutions. `optimizer`
    says whether `precision.optimizer` has optimizers step in torch's fused kernels. `compile` says whether `apply`
    has torch.compile, with its backend inductor, compile the model.
    `evidence` holds what a file can: text, numbers, booleans, None, and lists and mappings of these; it is frozen.

    Raises: `PolicyError` if a field holds what a policy cannot say.
    """

    name: str
    rules: tuple[Rule, ...]
    device: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    parameters: Parameters = field(default_factory=Parameters)
    float32_matmul: MatmulPrecision = "ieee"
    float8: Float8 = Float8()
    loss_scale: LossScale = LossScale()
    memory_format: MemoryFormat = "as_given"
    optimizer: OptimizerKernels = "as_given"
    compile: Compilation = "as_given"
    outputs: Outputs = "fp32"
    fallback: Rule = Rule(sites="*", format="fp32")
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Check the fields and freeze the containers."""
        check_text("name", self.name)
        object.__setattr__(self, "rules", _tuple_of_rules(self.name, self.rules))
        for name, kind in (
            ("parameters", Parameters),
            ("float8", Float8),
            ("loss_scale", LossScale),
            ("fallback", Rule),
        ):
            check_kind(name, getattr(self, name), kind)
        _check_rules(self.name, self.rules)
        for key, value in self.device.items():
            check_choice("device key", key, _DEVICE_KEYS)
            check_text(f"device.{key}", value)
        object.__setattr__(self, "device", MappingProxyType(dict(self.device)))
        check_choice("float32_matmul", self.float32_matmul, get_args(MatmulPrecision))
        check_choice("memory_format", self.memory_format, get_args(MemoryFormat))
        check_choice("optimizer", self.optimizer, get_args(OptimizerKernels))
        check_choice("compile", self.compile, get_args(Compilation))
        if self.optimizer == "fused" and self.parameters.optimizer_state != "fp32":
            raise PolicyError(
                f"optimizer is 'fused' and parameters.optimizer_state {self.parameters.optimizer_state!r}: torchao's "
                "optimizers with such state have no fused kernels; write optimizer: as_given, or optimizer_state: fp32"
            )
        check_choice("outputs", self.outputs, get_args(Outputs))
        object.__setattr__(self, "evidence", _frozen("evidence", self.evidence))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild the value: mapping proxies cannot be pickled or copied as they are."""
        return _rebuilt, ({item.name: _thawed(getattr(self, item.name)) for item in fields(self)},)

    def format_of(self, site: Site) -> tuple[str, int]:
        """Return the format that `site` runs in and the index of the rule that won."""
        found = self._winners.get(site)
        if found is None:
            index = next(index for index, pattern in enumerate(self._patterns) if pattern.matches(site))
            found = self._winners[site] = (self.rules[index].format, index)
        return found

    def depends_on_index(self, module: str, op: str) -> bool:
        """Return whether calls of `op` in `module` may run in different formats, by how often it ran before."""
        patterns = (each for each in self._patterns if each.matches_module(module) and each.matches_op(op))
        return next(patterns).names_index

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the number formats that rules name, each once, in order; `as_given` and `promote` are none."""
        names = ("fp32" if rule.format.startswith("fp32_") else rule.format for rule in self.rules)
        return tuple(dict.fromkeys(name for name in names if name in FORMATS))

    @property
    def matmul_precisions(self) -> tuple[MatmulPrecision, ...]:
        """Return the precisions inside FP32 matmuls, each once: `float32_matmul`, then those that rules name."""
        inside = (INSIDE_FP32[rule.format] for rule in self.rules if rule.format in INSIDE_FP32)
        return tuple(dict.fromkeys((self.float32_matmul, *inside)))

    @cached_property
    def _patterns(self) -> tuple[SitePattern, ...]:
        return tuple(SitePattern(rule.sites) for rule in self.rules)

    @cached_property
    def _winners(self) -> dict[Site, tuple[str, int]]:
        """Hold what `format_of` found: a model has a few thousand sites and asks for each at every step."""
        return {}
