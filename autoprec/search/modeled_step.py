"""A recorded step as the profile of a device shows it: modeled times and memory, errors emulated with ideal kernels."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from autoprec.analysis import Diagnosis, Marking, mark_recordings, run_backward
from autoprec.analysis.low_format import LowFormat, low_format
from autoprec.analysis.low_step import Reference, damage
from autoprec.analysis.site_errors import SiteErrors, site_errors
from autoprec.capture import Recording
from autoprec.graph.float8 import float8_faults
from autoprec.graph.layers import layers_of
from autoprec.graph.site import Site
from autoprec.measure.device_profiles import DeviceProfile
from autoprec.measure.paired import FP32
from autoprec.measure.roofline import INSIDE_FAMILIES, modeled_op_times, optimizer_seconds
from autoprec.ops import FLOAT8_OPS, lookup
from autoprec.policy import FLOAT8, LossScale, MatmulPrecision, Policy, Rule, resolve
from autoprec.runtime.device import DeviceInfo
from autoprec.search.baselines import baselines
from autoprec.search.cost_model import CostModel
from autoprec.search.fronts import FrontPlan, front_of, kept_in, loss_scale_of
from autoprec.search.layout import Layout, layout_of, lowerable_sites
from autoprec.search.rules import cover, rules_of
from autoprec.search.space import load_space, space_path

_MOST_STEPS = 100  # to find out where a format breaks the step
_ERRORS_S = 60.0  # for the errors of sites in one format
# What is rounded inside FP32 matmuls is emulated in this format: TF32 has its exponents and rounds eight times finer.
_INSIDE_FORMAT = "bf16"


@dataclass(frozen=True, kw_only=True)
class ModeledPolicy:
    """A policy with its modeled step time and memory.

    `error` is the gradient error that was emulated, NaN where it was not; `predicted_error` the sum over sites, NaN for
    a baseline. `limit` is the error that a healthy step may show in the formats of the policy.
    """

    name: str
    policy: Policy
    low: str
    step_s: float
    saved_bytes: int
    num_low: int
    num_float8: int = 0
    error: float = math.nan
    predicted_error: float = math.nan
    limit: float = math.inf

    @property
    def is_healthy(self) -> bool:
        """Return whether the error was emulated and is one that a healthy step may show; plain FP32 is healthy."""
        is_plain = self.num_low == 0 and self.policy.float32_matmul == "ieee"
        return is_plain or self.error <= self.limit


class ModeledStep:
    """A recorded step, the profile of a device, and the low formats to plan in."""

    def __init__(self, recording: Recording, profile: DeviceProfile, formats: Sequence[str]) -> None:
        self._graph, self._profile, self._formats = recording.op_graph, profile, formats
        self._device = DeviceInfo(
            kind=profile.lists, name=profile.title, capability={}, formats=profile.formats,
            native_formats=profile.formats, num_threads=1, torch_version="",
        )  # fmt: skip
        every = (*profile.low_formats, *((FLOAT8,) if profile.has_float8 else ()))
        overhead_s = optimizer_seconds(recording, profile)
        self._models = {
            inside: CostModel(
                op_graph=recording.op_graph,
                op_times=modeled_op_times(recording, profile, every, inside=inside),
                overhead_s=overhead_s,
            )
            for inside in profile.inside
        }
        self._space = replace(load_space(space_path(profile.space)), low=profile.low_formats or ("bf16",))
        self._marking = self._marked(recording)
        self._reference: Reference = self._marking.references[0]
        self._diagnoses: dict[str, Diagnosis] = {each.format: each for each in self._marking.diagnoses}
        self._known: dict[tuple[str, frozenset[Site]], float] = {}
        self._layout: Layout = layout_of(
            self._marking.marks, layers_of(recording.op_graph), self._space, lowerable_sites(recording.op_graph)
        )

    def _marked(self, recording: Recording) -> Marking:
        gradients = run_backward((recording,))
        recording.model.zero_grad(set_to_none=True)
        return mark_recordings((recording,), self._formats, self._device, gradients, _MOST_STEPS, kernels="ideal")

    def plans(self) -> Iterator[ModeledPolicy]:
        """Yield the plans of every low format, for every precision inside the FP32 matmuls that are left."""
        float8 = self._errors(FLOAT8, FLOAT8_OPS) if FLOAT8 in self._formats else None
        for low in (name for name in self._formats if name != FLOAT8):
            kept, errors = kept_in(self._marking.marks, low), self._errors(low)
            for inside, model in self._models.items():
                found = front_of(model, low, errors, kept, float8 if low == "bf16" else None)
                for place, plan in enumerate(found.plans):
                    name = f"cut-{place}-{low}" + ("" if inside == "ieee" else f"-matmul-{inside}")
                    modeled = self.modeled(self._policy(plan, low, name, inside), low)
                    yield replace(modeled, predicted_error=plan.error, limit=self._limit(self._rounded(modeled)))

    def baselines(self) -> tuple[tuple[ModeledPolicy, ...], dict[str, str]]:
        """Return the baselines that the device has units for, emulated, and why others have no prediction."""
        found, left_out = [], {}
        for name, policy in baselines(self._device, tuple(self._profile.inside), self._graph).items():
            reason = self._unpredictable(policy)
            if reason:
                left_out[name] = reason
                continue
            formats = [fmt for fmt in policy.formats if fmt not in (FP32, FLOAT8)]
            found.append(self.emulated(self.modeled(policy, formats[0] if formats else FP32)))
        return tuple(found), left_out

    def modeled(self, policy: Policy, low: str) -> ModeledPolicy:
        """Return a policy with its modeled time and memory."""
        formats = resolve(policy, self._graph.sites()).formats
        prediction = self._models[policy.float32_matmul].predict(formats, outputs=policy.outputs)
        return ModeledPolicy(
            name=policy.name,
            policy=policy,
            low=low,
            step_s=prediction.step_s,
            saved_bytes=prediction.saved_bytes,
            num_low=sum(fmt in (low, FLOAT8) for fmt in formats.values()) if low != FP32 else 0,
            num_float8=sum(fmt == FLOAT8 for fmt in formats.values()),
        )

    def emulated(self, each: ModeledPolicy) -> ModeledPolicy:
        """Return a policy with the gradient error of a step in which its low sites run low here.

        Sites of different formats are run apart, and the squares of their errors added. What is rounded inside FP32
        matmuls is bounded by bf16 there, results rounded too.
        """
        rounded = self._rounded(each)
        if not rounded or not {fmt for fmt, _ in rounded} <= set(self._diagnoses):
            return each
        error = math.sqrt(sum(self._damage(fmt, sites) ** 2 for fmt, sites in rounded))
        return replace(each, error=error, limit=self._limit(rounded))

    def _rounded(self, each: ModeledPolicy) -> list[tuple[str, frozenset[Site]]]:
        """Return which sites a policy rounds to which format; the last may be those it rounds inside alone."""
        formats = resolve(each.policy, self._graph.sites()).formats
        found = [(fmt, frozenset(site for site, own in formats.items() if own == fmt)) for fmt in (each.low, FLOAT8)]
        found = [(fmt, sites) for fmt, sites in found if fmt != FP32]
        if each.policy.float32_matmul != "ieee":
            inside = [
                site for site, own in formats.items() if own == FP32 and lookup(site.op).family in INSIDE_FAMILIES
            ]
            found.append((_INSIDE_FORMAT, frozenset(inside)))
        return [(fmt, sites) for fmt, sites in found if sites]

    def _damage(self, fmt: str, low: frozenset[Site]) -> float:
        if (fmt, low) not in self._known:
            scale = loss_scale_of(self._diagnoses[fmt])
            found = damage(self._reference, self._low(fmt), low, loss_scale=scale)
            self._known[fmt, low] = found.gradient_error
        return self._known[fmt, low]

    def _low(self, fmt: str) -> LowFormat:
        return low_format(fmt, self._device.kind, self._device.native_formats, "ideal")

    def _limit(self, rounded: Collection[tuple[str, frozenset[Site]]]) -> float:
        return max((self._diagnoses[fmt].check.limit for fmt, _ in rounded if fmt in self._diagnoses), default=math.inf)

    def _errors(self, fmt: str, ops: Collection[str] | None = None) -> SiteErrors:
        sites = [site for site in self._layout.sites if ops is None or site.op in ops]
        if fmt == FLOAT8:
            broken = kept_in(self._marking.marks, fmt)
            runs = {n.site for n in self._graph.calls() if self._low(fmt).can_run(n)}
            sites = [site for site in sites if site in runs and site not in broken]
        scale = loss_scale_of(self._diagnoses.get(fmt))
        return site_errors(self._reference, self._low(fmt), sites, loss_scale=scale, max_s=_ERRORS_S)

    def _unpredictable(self, policy: Policy) -> str:
        faults = float8_faults(resolve(policy, self._graph.sites()), self._graph)
        model = self._models[policy.float32_matmul]
        return faults[0] if faults else model.unpredictable(replace(policy, float32_matmul="ieee"))

    def _policy(self, plan: FrontPlan, low: str, name: str, inside: MatmulPrecision) -> Policy:
        """Return the policy that a plan of a front is: rules for FP8 first, then those of the low format."""
        targets = {site: low if site in plan.low_sites else FP32 for site in self._layout.sites}
        why = {site: self._why(site, low) for site, target in targets.items() if target == FP32}
        products = tuple(g for g in self._layout.groups if _op_of(g.glob) in FLOAT8_OPS)
        float8 = [Rule(sites=g.glob, format=FLOAT8) for g in cover(plan.float8_sites, products)]
        policy = Policy(
            name=name,
            device={"kind": self._profile.kind},
            float32_matmul=inside,
            loss_scale=LossScale(kind="dynamic") if low == "fp16" else LossScale(),
            rules=(*float8, *rules_of(targets, self._layout, low, why)),
        )
        dead = set(resolve(policy, self._layout.sites).dead_rules)
        return replace(policy, rules=tuple(rule for at, rule in enumerate(policy.rules) if at not in dead))

    def _why(self, site: Site, low: str) -> str:
        if self._layout.verdict(site, low) == "must":
            return self._layout.detail(site, low)
        return f"planned: {low} here would cost more, in modeled time or in gradient error, than it gains"


def _op_of(glob: str) -> str:
    return glob.rpartition(":")[2].partition("#")[0]
