"""The recorded step with chosen sites in a low format, and how far its gradient is from FP32's.

Casts are those of the runtime: the calls run under its cast mode, so what is judged here is what a policy would do.
"""

import math
import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoprec.analysis.low_format import LowFormat
from autoprec.capture import Recording, Replay
from autoprec.graph.opgraph import OpNode
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS, format_named
from autoprec.ops import lookup
from autoprec.runtime.cast_mode import CastMode
from autoprec.runtime.plans import Action, ModulePlans

Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
Visit: TypeAlias = Callable[[OpNode, Any], None]

_NOTHING: frozenset[Site] = frozenset()

# Each time the gradients are not finite, a dynamic loss scale backs off; so many halvings at once, so often.
_BACKOFF, _NUM_BACKOFFS = 2.0**-6, 3


class LowReplay(Replay):
    """One run of a recorded step in which the sites `low` run in the format, and all others in FP32.

    An op that has no numerics of its own (a mask, a concatenation) and reads only what is kept in FP32 keeps it, unless
    its site is `forced`. `visit(node, value)` is called after each node.
    """

    def __init__(
        self,
        recording: Recording,
        fmt: LowFormat,
        low: Collection[Site],
        *,
        forced: Collection[Site] = _NOTHING,
        visit: Visit | None = None,
    ) -> None:
        super().__init__(recording)
        self.extra_traceback = False
        self._graph, self._format, self._visit = recording.op_graph, fmt, visit
        self._low, self._forced = low, forced
        self._kept: set[str] = set()
        self._action: Action = None
        # The script wrote torch.finfo(x.dtype).min: in a low run that is another number.
        top, limit = FORMATS["fp32"].max, format_named(fmt.name).max
        self._limits = {top: limit, -top: -limit}
        self._mode = CastMode(self._plans_of, self._action_of, fmt.executors)

    def loss(self) -> torch.Tensor:
        """Return the loss in FP32, with its autograd graph."""
        self._mode.aside = True
        with self._mode, warnings.catch_warnings():
            # torch says of a norm with FP32 weights and low activations that it is not fused: slower, and right
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
            return super().loss().float()

    def run_node(self, n: fx.Node) -> Any:
        """Return what the node computes, in the format it is to run in."""
        node = self._graph[n.name]
        module, counts = (node.site.module, {node.site.op: node.site.index}) if node.site else ("", {})
        self._action = self._chosen(n, node)
        self._mode.aside = node.site is None and n.target is operator.call  # opaque: it casts by itself
        with self._mode.frame(module, counts) as frame:
            frame.grad_enabled = torch.is_grad_enabled()
            value = super().run_node(n)
        self._mode.aside = True  # what looks at the results is no call of the step
        if self._visit is not None:
            self._visit(node, value)
        return value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Return the arguments of a node; the limits of FP32 become those of the format where it is low."""
        arguments = super().fetch_args_kwargs_from_env(n)
        if self._action in (None, torch.float32):
            return arguments
        return pytree.tree_map(
            lambda value: self._limits.get(value, value) if type(value) is float else value, arguments
        )

    def _chosen(self, n: fx.Node, node: OpNode) -> Action:
        if node.site is None or not node.is_castable:
            if node.kind == "op" and any(each.name in self._kept for each in n.all_input_nodes):
                self._kept.add(n.name)
            return None
        if node.site not in self._low or not self._format.can_run(node):
            self._kept.add(n.name)
            return torch.float32
        if lookup(node.op).numerics == "clear" and node.site not in self._forced and self._reads_kept(n):
            self._kept.add(n.name)
            return None
        return self._format.action(node)

    def _reads_kept(self, n: fx.Node) -> bool:
        """Return whether every floating result that the node reads is kept in FP32, and there is one."""
        results = [each for each in n.all_input_nodes if self._is_result(self._graph[each.name])]
        return bool(results) and all(each.name in self._kept for each in results)

    @staticmethod
    def _is_result(node: OpNode) -> bool:
        return node.kind == "op" and any(meta.is_floating for meta in node.outputs)

    def _action_of(self, module: str, op: str, index: int) -> Action:  # noqa: ARG002
        return self._action

    def _plans_of(self, module: str) -> ModulePlans:
        return ModulePlans(module, self._action_of, lambda *_: True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """How far a low step is from the FP32 step: relative errors of the loss, and of the gradient of all parameters.

    Both are infinite where the loss or a gradient is not finite, and where the step cannot run: then `raised` is
    torch's message. `loss_scale` is the one that the gradients are finite with, or the one asked for.
    """

    loss_error: float
    gradient_error: float
    loss_scale: float = 1.0
    raised: str = ""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The loss and the gradients of a recorded step in FP32, by parameter, in the model's order."""

    recording: Recording
    loss: float
    gradients: Gradients

    @property
    def is_finite(self) -> bool:
        """Return whether the step is healthy in FP32."""
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in self.gradients if g is not None)


def reference_of(recording: Recording) -> Reference:
    """Return the recorded step as it is. Costs one step."""
    loss = recording.replay()
    return Reference(recording=recording, loss=loss.item(), gradients=gradients_of(loss, recording))


def damage(
    reference: Reference,
    fmt: LowFormat,
    low: Collection[Site],
    *,
    loss_scale: float = 1.0,
    least_scale: float | None = None,
    forced: Collection[Site] = _NOTHING,
) -> Damage:
    """Return what running the sites `low` in the format does to a step.

    Down to `least_scale`, smaller loss scales are tried where gradients are not finite, as a dynamic one does: what
    they mend is no fault of a site. Costs one step, then up to three more.
    """
    found = _damage_at(loss_scale, reference, fmt, low, forced)
    least = loss_scale if least_scale is None else least_scale
    for _ in range(_NUM_BACKOFFS):
        if not math.isfinite(found.loss_error) or math.isfinite(found.gradient_error) or found.loss_scale <= least:
            break
        found = _damage_at(max(found.loss_scale * _BACKOFF, least), reference, fmt, low, forced)
    return found if math.isfinite(found.gradient_error) else replace(found, loss_scale=loss_scale)


def _damage_at(
    loss_scale: float, reference: Reference, fmt: LowFormat, low: Collection[Site], forced: Collection[Site]
) -> Damage:
    try:
        loss = LowReplay(reference.recording, fmt, low, forced=forced).loss()
        gradients = gradients_of(loss, reference.recording, loss_scale) if loss.isfinite() else ()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # kernels that are missing, indices astray
        raised = (str(error) or type(error).__name__).splitlines()[0]
        return Damage(loss_error=math.inf, gradient_error=math.inf, loss_scale=loss_scale, raised=raised)
    if not gradients:
        return Damage(loss_error=math.inf, gradient_error=math.inf, loss_scale=loss_scale)
    return Damage(
        loss_error=abs(loss.item() - reference.loss) / max(abs(reference.loss), FORMATS["fp32"].min_normal),
        gradient_error=relative_error(gradients, reference.gradients),
        loss_scale=loss_scale,
    )


def relative_error(gradients: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> float:
    """Return the norm of the difference over the norm of what is right; infinite if anything is not finite."""
    difference = norm = 0.0
    for one, other in zip(gradients, right, strict=True):
        if one is not None and not one.isfinite().all():
            return math.inf
        if other is not None:
            missing = other.double() if one is None else one.double() - other.double()
            difference += float(missing.square().sum())
            norm += float(other.double().square().sum())
    if norm:
        return math.sqrt(difference / norm)
    return math.inf if difference else 0.0


def gradients_of(loss: torch.Tensor, recording: Recording, loss_scale: float = 1.0) -> Gradients:
    """Return the gradient of every trainable parameter of the recorded model, None where the loss does not use it."""
    parameters = [each for each in recording.model.parameters() if each.requires_grad]
    found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(loss * loss_scale, parameters, allow_unused=True)
    return tuple(None if each is None else _dense(each) / loss_scale for each in found)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
