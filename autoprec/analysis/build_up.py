"""How errors build up along a step: every site of a low run held against FP32, and FP32 against FP64.

The two runs are not held in memory side by side: of each result up to `_NUM_KEPT` elements, evenly spread, are kept of
the exact run, and the other run is compared with them.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import LowReplay, Reference, gradients_of, relative_error
from autoprec.capture import Recording, Replay
from autoprec.capture.facts import tensors_in_tree
from autoprec.graph.opgraph import OpNode
from autoprec.graph.site import Site

_NUM_KEPT = 4096
# A gradient that FP32 gets wrong by this much is no yardstick for low formats.
DOUBTFUL = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteError:
    """The relative error (norms) of a site's result in its first and in its last call, everything before it low too."""

    site: Site
    first: float
    last: float


def build_up(reference: Reference, fmt: LowFormat, low: Collection[Site]) -> tuple[SiteError, ...]:
    """Return the error of every site whose result is finite in FP32, in order. Costs two forward passes.

    Empty where the low step cannot run; infinite where a low result is not finite.
    """
    exact: dict[str, torch.Tensor] = {}
    errors: dict[Site, list[float]] = {}

    def keep(node: OpNode, value: Any) -> None:
        sample = _sample(value) if node.site is not None else None
        if sample is not None and bool(sample.isfinite().all()):
            exact[node.name] = sample

    def compare(node: OpNode, value: Any) -> None:
        sample = _sample(value)
        if node.name in exact and node.site is not None and sample is not None:
            errors.setdefault(node.site, []).append(_error(sample, exact.pop(node.name)))

    with torch.no_grad():
        LowReplay(reference.recording, fmt, frozenset(), visit=keep).loss()
        try:
            LowReplay(reference.recording, fmt, low, visit=compare).loss()
        except (RuntimeError, TypeError, ValueError, IndexError):
            return ()
    return tuple(SiteError(site=site, first=each[0], last=each[-1]) for site, each in errors.items())


def error_of_fp32(reference: Reference) -> float:
    """Return the relative error of FP32's gradient against FP64's; NaN where the step does not run in FP64.

    Costs one step in FP64.
    """
    try:
        loss = _WideReplay(reference.recording).loss()
        gradients = gradients_of(loss, reference.recording)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return math.nan
    return relative_error(reference.gradients, gradients)


class _WideReplay(Replay):
    """Runs a recorded step in FP64: every floating argument of every call is widened."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.extra_traceback = False

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Return the arguments of a node, in FP64."""
        arguments = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map(_widened, arguments) if n.op == "call_function" else arguments


def _widened(value: Any) -> Any:
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    if isinstance(value, torch.Tensor) and value.dtype in narrow:
        return value.to(torch.float64)
    return torch.float64 if isinstance(value, torch.dtype) and value in narrow else value


def _sample(value: Any) -> torch.Tensor | None:
    """Return up to `_NUM_KEPT` elements of the first floating tensor in a result, in FP32."""
    first = next((t for t in tensors_in_tree(value) if t.is_floating_point() and t.layout == torch.strided), None)
    if first is None or not first.numel():
        return None
    flat = first.detach().reshape(-1)
    return flat[:: max(flat.numel() // _NUM_KEPT, 1)].to(torch.float32, copy=True)


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    if not bool(found.isfinite().all()):
        return math.inf
    norm = float(right.double().norm())
    difference = float((found.double() - right.double()).norm())
    if norm:
        return difference / norm
    return math.inf if difference else 0.0
