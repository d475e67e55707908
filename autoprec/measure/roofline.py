"""Times of a recorded step on a device that is not at hand: a roofline over the figures of its profile. All modeled.

A call takes max(operations / (peak x achievable), bytes / (bandwidth x achievable)) + launch, forward and backward.
Bytes are those of its tensors once: no cache keeps them and no compiler fuses it with others. What a call saves for
its backward pass is found by running it once in FP32 on the device at hand; low results and what is kept of them are
of the low format, memory that only autograd sees is the same.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autoprec.capture import Recording, Replay
from autoprec.graph.flops import flops_of, is_depthwise
from autoprec.graph.opgraph import OpNode
from autoprec.measure.call_facts import CallFacts, TensorFact, facts_of
from autoprec.measure.cast_time import DIRECTIONS, LAYOUTS, CastTime, CastTimes, key
from autoprec.measure.device_profiles import DeviceProfile
from autoprec.measure.op_call import Kept, isolated
from autoprec.measure.op_time import OpTimes, signatures, untouched_random
from autoprec.measure.paired import FP32, Timing
from autoprec.measure.time_cache import OpTime
from autoprec.ops import FLOAT8_OPS, float8_fault, lookup
from autoprec.policy import FLOAT8, MatmulPrecision
from autoprec.runtime.dtypes import torch_dtype

# Fractions of the dense peak that good kernels reach on large shapes; small ones stay below. From memory: matrix
# products run at 0.65 to 0.8 of the peak on A100 and H100, convolutions at about half, FlashAttention-2 at 0.35 (H100)
# to 0.7 (A100) forward and less backward; recurrent layers multiply by small matrices, step after step.
ACHIEVABLE: Mapping[str, float] = MappingProxyType(
    {"matmul": 0.7, "convolution": 0.5, "attention": 0.4, "recurrent": 0.3}
)
# STREAM and copies reach 0.75 to 0.9 of the bandwidth of data sheets, on CPUs and GPUs alike.
ACHIEVABLE_BANDWIDTH = 0.8
# FlashAttention computes the scores anew: five products of their size for the two of the forward pass.
# Source: Dao 2023, FlashAttention-2, section 4.1.
_ATTENTION_BACKWARD = 2.5
INSIDE_FAMILIES = frozenset({"matmul", "convolution", "recurrent"})
_GATHERS = frozenset({"embedding", "indexing"})
# torchao reads an operand for its largest magnitude, then again to round it: two kernels, and one byte written.
_ROUNDING_KERNELS = 2
_LARGEST = 2**40
# AdamW reads weight, gradient and two moments, and writes all but the gradient, in FP32, in one fused kernel.
_OPTIMIZER_BYTES = 7 * 4


def modeled_op_times(
    recording: Recording, profile: DeviceProfile, formats: Sequence[str], *, inside: MatmulPrecision = "ieee"
) -> OpTimes:
    """Return the modeled times of a recorded step in FP32 and `formats`, as `measure_op_times` returns measured ones.

    `inside` is the precision inside FP32 matmuls. Costs two forward passes on the device at hand. A signature has FP8
    where FP8 kernels take its shapes.
    """
    facts = facts_of(recording)
    by_name = {each.name: each for each in facts}
    keeping = _Keeping(recording, dict(signatures(facts)))
    with untouched_random(recording.device):
        keeping.loss()
    model = _Roofline(profile, inside)
    times = {}
    for signature, name in signatures(facts).items():
        node, kept = recording.op_graph[name], keeping.found.get(signature, Kept())
        times[signature] = {
            fmt: model.op_time(node, by_name[name], kept, fmt) for fmt in (FP32, *formats) if _runs(node, fmt)
        }
    casts = {key(fmt, way, layout): model.cast() for fmt in formats for way in DIRECTIONS for layout in LAYOUTS}
    return OpTimes(
        facts=facts,
        formats=tuple(formats),
        times=times,
        casts=CastTimes(points=casts),
        measured_s=0.0,
        num_from_cache=0,
        num_unmeasured=0,
    )


def optimizer_seconds(recording: Recording, profile: DeviceProfile) -> float:
    """Return the modeled time of a fused AdamW on the FP32 parameters of a recorded step, whatever its optimizer."""
    numel = sum(each.numel() for each in recording.model.parameters() if each.requires_grad)
    return _OPTIMIZER_BYTES * numel / _bandwidth(profile) + profile.launch.value


def _bandwidth(profile: DeviceProfile) -> float:
    return profile.bandwidth.value * ACHIEVABLE_BANDWIDTH


def _runs(node: OpNode, fmt: str) -> bool:
    if fmt != FLOAT8:
        return True
    is_product = node.op in FLOAT8_OPS and node.is_castable and node.site is not None
    return is_product and not float8_fault(node.op, [tensor.shape for tensor in node.inputs])


class _Keeping(Replay):
    """One replay that finds out what the first call of each signature keeps for its backward pass."""

    def __init__(self, recording: Recording, firsts: Mapping[str, str]) -> None:
        super().__init__(recording)
        self.found: dict[str, Kept] = {}
        self._graph, self._signature_of = recording.op_graph, {name: each for each, name in firsts.items()}

    def run_node(self, n: fx.Node) -> Any:
        """Return what the node computes."""
        if n.name in self._signature_of:
            node = self._graph[n.name]
            dtype = torch.float32 if node.site is not None and node.is_castable else None
            arguments = self.fetch_args_kwargs_from_env(n)
            with untouched_random(self._recording.device), contextlib.suppress(RuntimeError, TypeError, ValueError):
                # what does not run by itself keeps nothing that is known
                self.found[self._signature_of[n.name]] = isolated(n.target, node, arguments, dtype).kept()
        return super().run_node(n)


@dataclass(frozen=True, slots=True)
class _Roofline:
    """The figures of a profile, with a precision inside FP32 matmuls."""

    profile: DeviceProfile
    inside: MatmulPrecision

    def op_time(self, node: OpNode, facts: CallFacts, kept: Kept, fmt: str) -> OpTime:
        """Return the modeled time of one call in a format, and what it keeps there."""
        low = _kept_low(node, kept, "bf16" if fmt == FLOAT8 else fmt)
        if _is_view(node, facts):
            return OpTime(timing=Timing(forward_s=0.0, backward_s=0.0, num_rounds=0), kept=low)
        forward_s, backward_s = self._seconds(node, facts, kept, "bf16" if fmt == FLOAT8 else fmt, fmt)
        return OpTime(timing=Timing(forward_s=forward_s, backward_s=backward_s, num_rounds=0), kept=low)

    def cast(self) -> tuple[CastTime, ...]:
        """Return the points of a cast: six bytes an element each way, for the gradient too; a line between two."""
        launch, slope = self.profile.launch.value, 6 / _bandwidth(self.profile)
        lines = ((numel, launch + numel * slope) for numel in (1, _LARGEST))
        return tuple(CastTime(numel=numel, forward_s=each, backward_s=each) for numel, each in lines)

    def _seconds(self, node: OpNode, facts: CallFacts, kept: Kept, fmt: str, units: str) -> tuple[float, float]:
        launch, family = self.profile.launch.value, lookup(node.op).family
        read, written = _sizes(node, facts, fmt)
        flops, rate = flops_of(node), self._rate(node, family, units)
        forward_s = max(flops / rate, _moved(family, read, written) / _bandwidth(self.profile)) + launch
        wanted = [size for size, fact in zip(read, facts.inputs, strict=True) if fact.requires_grad]
        if not any(fact.requires_grad for fact in facts.outputs):
            return forward_s + self._rounding_s(facts, units, 0), 0.0
        if flops and family != "attention":
            num_products = min(len(wanted), 2)
            each_s = max(flops / rate, (sum(read) + sum(written)) / _bandwidth(self.profile)) + launch
            backward_s = num_products * each_s
        else:
            saved = [read[at] for at in kept.saved_inputs] + [written[at] for at in kept.saved_outputs]
            num_bytes = sum(saved) + sum(written) + sum(wanted)
            backward_s = max(_ATTENTION_BACKWARD * flops / rate, num_bytes / _bandwidth(self.profile)) + launch
        return forward_s + self._rounding_s(facts, units, 0), backward_s + self._rounding_s(facts, units, 1)

    def _rate(self, node: OpNode, family: str, units: str) -> float:
        """Return the operations a second that are within reach; a depthwise convolution has the FP32 units."""
        peak = self.profile.peaks[FP32 if is_depthwise(node) else units].value
        if units == FP32 and family in INSIDE_FAMILIES and not is_depthwise(node):
            peak = self.profile.inside[self.inside]
        return peak * ACHIEVABLE.get(family, ACHIEVABLE["matmul"])

    def _rounding_s(self, facts: CallFacts, units: str, num_gradients: int) -> float:
        """Return what it takes to round the operands of an FP8 product: both, and in the backward pass the gradient."""
        if units != FLOAT8:
            return 0.0
        given = [2 * (4 if fact.is_stored else 2) * fact.numel + fact.numel for fact in facts.inputs[:2]]
        given += [5 * fact.numel for fact in facts.outputs[:num_gradients]]
        return sum(given) / _bandwidth(self.profile) + len(given) * _ROUNDING_KERNELS * self.profile.launch.value


def _sizes(node: OpNode, facts: CallFacts, fmt: str) -> tuple[list[int], list[int]]:
    """Return the bytes of the inputs and of the results; of a norm, only the first input is low."""
    low = torch_dtype(fmt).itemsize
    is_first = lookup(node.op).cast == "first"
    read = [_bytes(fact, low if not (is_first and place) else 4) for place, fact in enumerate(facts.inputs)]
    return read, [_bytes(fact, low) for fact in facts.outputs]


def _bytes(fact: TensorFact, floating: int) -> int:
    """Return the bytes of a tensor; one that is expanded has no more than its memory."""
    size = floating if fact.is_floating else getattr(torch, fact.dtype).itemsize
    return min(fact.numel, fact.root_numel) * size


def _moved(family: str, read: Sequence[int], written: Sequence[int]) -> int:
    """Return the bytes that a call moves; a gather reads of a table what it returns."""
    most = sum(written)
    return sum(min(size, most) if family in _GATHERS else size for size in read) + most


def _is_view(node: OpNode, facts: CallFacts) -> bool:
    """Return whether a call computes nothing: its results lie in the memory of its arguments, and it does not write."""
    roots = {fact.root for fact in facts.inputs}
    writes = node.writes or node.kwargs.get("inplace") is True
    return not writes and bool(facts.outputs) and all(fact.root in roots for fact in facts.outputs)


def _kept_low(node: OpNode, kept: Kept, fmt: str) -> Kept:
    """Return what a call keeps in a format: its FP32 results are of that format, unless it names their dtype."""
    if fmt == FP32 or node.kwargs.get("dtype") is not None:
        return kept
    low = str(torch_dtype(fmt)).removeprefix("torch.")
    return replace(kept, outputs=tuple(low if dtype == "float32" else dtype for dtype in kept.outputs))
