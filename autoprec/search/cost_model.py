"""The cost model: what a step takes and saves for its backward pass under any assignment of formats to sites."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoprec.errors import MeasurementError
from autoprec.graph.cut import CastCost, OpCost
from autoprec.graph.opgraph import OpGraph, OpNode
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.measure.call_facts import CallFacts, TensorFact
from autoprec.measure.op_time import OpTimes
from autoprec.measure.paired import FP32
from autoprec.measure.time_cache import OpTime
from autoprec.ops import lookup
from autoprec.policy import AS_GIVEN, FLOAT8, INSIDE_FP32, PROMOTE, Policy, resolve
from autoprec.runtime.calls import Call
from autoprec.runtime.dtypes import DTYPES
from autoprec.runtime.plans import agrees

_DTYPES = {name: str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()}
_LAYOUT_GAIN = 1.6  # of channels last on the convolutional workloads of benchmarks/zoo/
# Families of ops that inductor calls in libraries; it writes kernels of its own for the others.
_LIBRARY_FAMILIES = ("matmul", "convolution", "attention", "recurrent", "linalg")
_FORMATS = {dtype: name for name, dtype in _DTYPES.items()}
_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step is predicted to take: `step_s` is the sum of ops, casts and overhead, infinite if an op cannot run.

    `saved_bytes` are kept for the backward pass. With `is_bound` the step takes at least that long.
    """

    step_s: float
    saved_bytes: int
    op_s: float
    cast_s: float
    overhead_s: float
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Op and cast times of a recorded step, put together.

    `overhead_s` is what is not an op: the optimizer, Python, launches; `overhead_bytes` what is saved by code that was
    not measured. Both are zero until the model is `calibrated`.
    """

    op_graph: OpGraph
    op_times: OpTimes
    overhead_s: float = 0.0
    overhead_bytes: int = 0

    def predict(self, formats: Mapping[Site, str], *, outputs: str = FP32) -> Prediction:
        """Return the prediction for an assignment; a site it lacks is given what its producers make.

        `outputs` is that of a policy: with `fp32`, what the loss reads of the model's results is FP32.
        """
        step = _Step(self, formats, fp32_outputs=outputs == FP32)
        for facts in self.op_times.facts:
            step.take(self.op_graph[facts.name], facts)
        return Prediction(
            step_s=step.op_s + step.cast_s + self.overhead_s,
            saved_bytes=sum(step.saved.values()) + step.fresh_bytes + self.overhead_bytes,
            op_s=step.op_s,
            cast_s=step.cast_s,
            overhead_s=self.overhead_s,
            is_bound=step.is_bound,
        )

    def predict_policy(self, policy: Policy) -> Prediction:
        """Return the prediction for a policy.

        Raises: `MeasurementError` for one whose parts were not measured, such as low storage of the parameters.
        """
        reason = self.unpredictable(policy)
        if reason:
            raise MeasurementError(f'policy "{policy.name}": its step time cannot be predicted: {reason}; measure it')
        return self.predict(resolve(policy, self.op_graph.sites()).formats, outputs=policy.outputs)

    def slowdown(self, policy: Policy, fp32_step_s: float) -> float | None:
        """Return the predicted step time of a policy over FP32's, what it stores left out of account.

        Where an op was too slow to be timed twice, it is a lower bound; None where ops were not timed in its formats or
        its memory layout. Of a policy that compiles the model it is about a lower bound too: of the ops that inductor
        calls as eager code does, since it fuses the others, and less what another layout may gain.
        """
        formats = resolve(policy, self.op_graph.sites()).formats
        is_timed = set(formats.values()) <= {FP32, AS_GIVEN, PROMOTE, *self.op_times.formats}
        if not is_timed:
            return None
        is_laid_out = policy.memory_format != AS_GIVEN
        if policy.compile != AS_GIVEN:
            return self._library_s(formats) / fp32_step_s / (_LAYOUT_GAIN if is_laid_out else 1.0)
        if is_laid_out:
            return None
        model = self.calibrated(fp32_step_s)
        return model.predict(formats, outputs=policy.outputs).step_s / fp32_step_s

    def _library_s(self, formats: Mapping[Site, str]) -> float:
        """Return the time of the ops of an assignment that are calls of a library, compiled or not."""
        total = 0.0
        for facts in self.op_times.facts:
            site = self.op_graph[facts.name].site
            if facts.signature is not None and site is not None and lookup(site.op).family in _LIBRARY_FAMILIES:
                times = self.op_times.times.get(facts.signature, {})
                time = times.get(formats.get(site, FP32)) or times.get(FP32)
                total += time.timing.total_s if time else 0.0
        return total

    def unpredictable(self, policy: Policy) -> str:
        """Return why no time can be predicted for a policy; empty if one can."""
        measured = {FP32, AS_GIVEN, PROMOTE, *self.op_times.formats}
        others = sorted(set(resolve(policy, self.op_graph.sites()).formats.values()) - measured)
        if others:
            return f"ops were not timed in {', '.join(others)}, only in {', '.join((FP32, *self.op_times.formats))}"
        if policy.parameters.storage != FP32 or policy.parameters.optimizer_state != FP32:
            return "it stores parameters or optimizer state in another format than fp32"
        if policy.compile != AS_GIVEN:
            return f"it compiles the model with {policy.compile}"
        if policy.float32_matmul != "ieee":
            return f"it reduces FP32 matmuls to {policy.float32_matmul} inside"
        return ""

    def calibrated(self, fp32_step_s: float, fp32_saved_bytes: int | None = None) -> "CostModel":
        """Return the model with the overhead that makes the FP32 step, measured to take `fp32_step_s`, come out right.

        Times of ops alone add up to less than a step, or to more where a step has warmer caches than they had: the
        overhead may be negative.
        """
        plain = replace(self, overhead_s=0.0, overhead_bytes=0).predict(self.uniform(FP32))
        rest = 0 if fp32_saved_bytes is None else fp32_saved_bytes - plain.saved_bytes
        return replace(self, overhead_s=fp32_step_s - plain.step_s, overhead_bytes=rest)

    def uniform(self, fmt: str) -> dict[Site, str]:
        """Return the assignment of one format to every site."""
        return dict.fromkeys(self.op_graph.sites(), fmt)

    def op_costs(self, low: str) -> dict[str, OpCost]:
        """Return what each node that was timed costs in FP32 and in the format `low`, by its name.

        A node that no policy casts has costs too: it runs in the format of what it is given. Memory that several nodes
        save is the first one's. Where the budget did not reach a signature, `low_s` is infinite and `fp32_s` zero.
        """
        costs: dict[str, OpCost] = {}
        claimed: set[str] = set()
        for facts in self.op_times.facts:
            if facts.signature is None:
                continue
            times = self.op_times.times.get(facts.signature, {})
            fp32, lower = times.get(FP32), times.get(low)
            costs[facts.name] = OpCost(
                fp32_s=fp32.timing.total_s if fp32 else 0.0,
                low_s=lower.timing.total_s if lower else math.inf,
                fp8_s=times[FLOAT8].timing.total_s if FLOAT8 in times else math.inf,
                fp32_bytes=_own_bytes(facts, fp32, FP32, claimed),
                low_bytes=_own_bytes(facts, lower, low, claimed),
            )
            for each in (fp32, lower):
                claimed.update(fact.root for fact in _saved(facts, each))
        return costs

    def cast_costs(self, low: str) -> dict[str, CastCost]:
        """Return what casting the floating results of each node once takes, by its name.

        The runtime shares the casts of parameters alone: each further reader of an activation casts it anew. A node
        that picks one of several results has the cost of that one.
        """
        costs = {}
        for facts in self.op_times.facts:
            floating = [fact for fact in facts.outputs if fact.is_floating]
            if floating:
                down, up = (sum(self.cast_seconds(low, way, fact) for fact in floating) for way in ("down", "up"))
                shared = self.op_graph[facts.name].kind == "parameter"
                costs[facts.name] = CastCost(down_s=down, up_s=up, shared=shared)
        return costs

    def cast_seconds(self, low: str, direction: str, fact: TensorFact) -> float:
        """Return the time of one cast of a tensor, `down` to a low format or `up` from it, and of its gradient."""
        return self.op_times.casts.seconds(
            low,
            "down" if direction == "down" else "up",
            fact.numel,
            layout="dense" if fact.is_dense else "strided",
            grad=fact.requires_grad,
        )


@dataclass
class _Step:
    """A walk over one step: which dtype every tensor has, what has been spent, what is saved."""

    model: CostModel
    assignment: Mapping[Site, str]
    fp32_outputs: bool
    op_s: float = 0.0
    cast_s: float = 0.0
    is_bound: bool = False
    fresh_bytes: int = 0
    saved: dict[tuple[str, str], int] = field(default_factory=dict)
    formats: dict[tuple[str, int], str] = field(default_factory=dict)
    shared: set[tuple[tuple[str, int], str]] = field(default_factory=set)
    of_loss: set[tuple[str, int]] = field(default_factory=set)  # what loss code made of what the model returned

    def take(self, node: OpNode, facts: CallFacts) -> None:
        """Spend what a node costs."""
        if facts.signature is None:
            self._pass_on(facts)
            return
        given = [self._given(fact, node) for fact in facts.inputs]
        wanted = self._wanted(node, given)
        used = [self._cast(node, place, fact, given[place], wanted) for place, fact in enumerate(facts.inputs)]
        run = wanted or _widest(given)
        times = self.model.op_times.times.get(facts.signature, {})
        time = times.get(run) or times.get(FP32)
        if time is not None:
            self.op_s += time.timing.total_s
            self.is_bound |= time.timing.is_bound
            self._save(facts, time, used)
        made = time.kept.outputs if time is not None and len(time.kept.outputs) == len(facts.outputs) else ()
        in_loss = _in_loss(node) or (node.site is None and any(fact.source in self.of_loss for fact in facts.inputs))
        for place, fact in enumerate(facts.outputs):
            if fact.source[0] == facts.name:
                dtype = made[place] if made else fact.dtype
                self.formats[fact.source] = _FORMATS.get(dtype, dtype)
                self.of_loss.update({fact.source} if in_loss else ())

    def _pass_on(self, facts: CallFacts) -> None:
        for fact in facts.outputs:
            self.formats.setdefault(fact.source, _FORMATS.get(fact.dtype, fact.dtype))

    def _given(self, fact: TensorFact, node: OpNode) -> str:
        """Return the format of an input; what the loss reads of the model's results was cast to FP32 for it."""
        found = self.formats.get(fact.source, _FORMATS.get(fact.dtype, fact.dtype))
        enters = _in_loss(node) and fact.source not in self.of_loss
        if self.fp32_outputs and enters and found in self.model.op_times.formats:
            self._spend_cast(fact, found, FP32, shared=True)
            self.formats[fact.source] = found = FP32
        return found

    def _wanted(self, node: OpNode, given: list[str]) -> str | None:
        """Return the format a policy casts the arguments of a node to; None if it casts nothing."""
        if node.site is None or not node.is_castable:
            return None
        word = self.assignment.get(node.site, AS_GIVEN)
        if word in INSIDE_FP32:
            return FP32
        if word == AS_GIVEN and lookup(node.op).cast == "first":
            return given[0] if given and given[0] in _BYTES else None
        if word == AS_GIVEN and not agrees(Call(lookup(node.op))):
            return None
        return _widest(given) if word in (AS_GIVEN, PROMOTE) else word

    def _cast(self, node: OpNode, place: int, fact: TensorFact, given: str, wanted: str | None) -> tuple[str, str]:
        """Return root and format of the memory that the call reads, after a cast if it takes one."""
        if wanted == FLOAT8:  # what it rounds to FP8 is part of its time, and is not kept: rows are bf16 or fp16
            wanted = "bf16" if given == FP32 and not fact.is_stored else None
        is_cast = wanted is not None and fact.is_floating and given in _BYTES and given != wanted
        if not is_cast or (lookup(node.op).cast == "first" and place > 0):
            return fact.root, given
        assert wanted is not None
        self._spend_cast(fact, given, wanted, shared=fact.is_stored)
        return (f"{fact.source} as {wanted}" if fact.is_stored else f"{node.name} reads {place}"), wanted

    def _spend_cast(self, fact: TensorFact, given: str, wanted: str, *, shared: bool) -> None:
        if shared and (fact.source, wanted) in self.shared:
            return
        self.shared.add((fact.source, wanted))
        low, direction = (wanted, "down") if given == FP32 else (given, "up")
        self.cast_s += self.model.cast_seconds(low, direction, fact)

    def _save(self, facts: CallFacts, time: OpTime, used: list[tuple[str, str]]) -> None:
        self.fresh_bytes += time.kept.fresh_bytes
        for place in time.kept.saved_inputs:
            fact, (root, fmt) = facts.inputs[place], used[place]
            if fact.is_stored and root == fact.root:
                continue
            numel = fact.root_numel if root == fact.root else fact.numel
            self.saved[root, fmt] = numel * _size(fmt)
        for place in time.kept.saved_outputs:
            fact = facts.outputs[place]
            fmt = _FORMATS.get(time.kept.outputs[place], time.kept.outputs[place])
            self.saved[fact.root, fmt] = fact.root_numel * _size(fmt)


def _in_loss(node: OpNode) -> bool:
    return node.site is not None and node.site.module == LOSS_MODULE


def _widest(given: list[str]) -> str:
    """Return the format that holds all floating ones of `given`: FP32 for a mix of two low ones."""
    floating = {fmt for fmt in given if fmt in _BYTES}
    return next(iter(floating)) if len(floating) == 1 else FP32


def _size(fmt: str) -> int:
    """Return the bytes of an element in a format, or in another dtype by torch's name."""
    if fmt in _BYTES:
        return _BYTES[fmt]
    digits = "".join(char for char in fmt if char.isdigit())
    return max(1, int(digits) // 8) if digits else 1


def _saved(facts: CallFacts, time: OpTime | None) -> list[TensorFact]:
    if time is None:
        return []
    return [facts.inputs[at] for at in time.kept.saved_inputs] + [facts.outputs[at] for at in time.kept.saved_outputs]


def _own_bytes(facts: CallFacts, time: OpTime | None, fmt: str, claimed: set[str]) -> int:
    """Return what a node saves in a format and no node before it; parameters as they are stored are never saved."""
    if time is None:
        return 0
    total = time.kept.fresh_bytes
    for root, fact in {fact.root: fact for fact in _saved(facts, time)}.items():
        is_own = fact.is_stored and fmt == FP32
        if root not in claimed and not is_own:
            size = _size(fmt) if fact.is_floating else _size(fact.dtype)
            total += fact.root_numel * size
    return total
