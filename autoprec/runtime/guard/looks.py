"""A look at gradients and weights around one step, on a thousand elements of each tensor.

Gradients are looked at as the backward pass left them, times the loss scale: that is what the low formats held.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autoprec.graph.site import Site
from autoprec.numerics import FORMATS
from autoprec.runtime.precision import Precision
from autoprec.runtime.stored import stored

_MOST_ELEMENTS = 1024
_FEWEST_MOVING = 8  # of fewer elements with a gradient nothing is said
_NEAR_END = 4.0  # within two doublings of the largest number

# FP8 matmuls scale their operands with each call, and hand on bf16 or fp16.
_NARROW = frozenset(
    name for name, fmt in FORMATS.items() if fmt.exponent_bits < FORMATS["fp32"].exponent_bits and fmt.storage_bits > 8
)
# The op whose format decides in which one the gradients of a module's own parameters are computed.
_OP_OF: Mapping[type[nn.Module], str] = MappingProxyType(
    {
        nn.Linear: "linear",
        nn.Conv1d: "conv1d",
        nn.Conv2d: "conv2d",
        nn.Conv3d: "conv3d",
        nn.LayerNorm: "layer_norm",
        nn.GroupNorm: "group_norm",
        nn.RMSNorm: "rms_norm",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientLook:
    """Of each layer in a narrow format: how much of its gradients flushes, and how much is near the end of the range.

    Below the format's smallest normal number, zero included, counts as flushed; weights near the end count as well.
    """

    layers: tuple[str, ...] = ()
    flush: tuple[float, ...] = ()
    overflow: tuple[float, ...] = ()

    @property
    def flush_frac(self) -> float | None:
        """Return the mean over layers; None if there is no layer in a narrow format."""
        return sum(self.flush) / len(self.flush) if self.flush else None

    @property
    def overflow_frac(self) -> float | None:
        """Return the mean over layers; None if there is no layer in a narrow format."""
        return sum(self.overflow) / len(self.overflow) if self.overflow else None


def look_at_gradients(precision: Precision, *, scale: float = 1.0) -> GradientLook:
    """Return what became of the gradients that are there now; they are multiplied by `scale` first."""
    layers: list[str] = []
    parts: list[tuple[int, bool, float, float, torch.Tensor]] = []
    for path, name, parameters in narrow_layers(precision):
        gradients = [_some(each.grad) for each in parameters if each.grad is not None and each.numel()]
        if gradients:
            low, high = FORMATS[name].min_normal, FORMATS[name].max / _NEAR_END
            given = [each if scale == 1.0 else each * scale for each in gradients]
            parts += [(len(layers), True, low, high, each) for each in given]
            parts += [(len(layers), False, low, high, _some(each)) for each in parameters if each.numel()]
            layers.append(path)
    if not layers:
        return GradientLook()
    counts = _fractions([each for *_, each in parts], [low for _, _, low, _, _ in parts], [row[3] for row in parts])
    small: list[list[float]] = [[] for _ in layers]
    large: list[list[float]] = [[] for _ in layers]
    for (layer, is_gradient, *_), (below, above) in zip(parts, counts, strict=True):
        large[layer].append(above)
        if is_gradient:
            small[layer].append(below)
    return GradientLook(
        layers=tuple(layers),
        flush=tuple(sum(each) / len(each) for each in small),
        overflow=tuple(sum(each) / len(each) for each in large),
    )


def _fractions(
    tensors: Sequence[torch.Tensor], lows: Sequence[float], highs: Sequence[float]
) -> list[tuple[float, float]]:
    """Return which part of each tensor is below its low end, and above its high one; all at once, waits once."""
    home = tensors[0].device
    sizes = torch.tensor([each.numel() for each in tensors], device=home)
    owners = torch.repeat_interleave(torch.arange(len(tensors), device=home), sizes)
    flat = torch.cat([each.to(home, torch.float32) for each in tensors]).abs()
    is_out = torch.stack(
        [flat < torch.tensor(lows, device=home)[owners], flat > torch.tensor(highs, device=home)[owners]]
    )
    counts = torch.zeros(2, len(tensors), device=home).index_add_(1, owners, is_out.float())
    below, above = (counts / sizes).tolist()
    return list(zip(below, above, strict=True))


def narrow_layers(precision: Precision) -> Iterator[tuple[str, str, list[nn.Parameter]]]:
    """Yield path, format and own parameters of each module that computes in a format of less range than FP32.

    Embeddings are left out: the rows of absent tokens have gradients of zero in any format.
    """
    if not _NARROW.intersection(precision.policy.formats):
        return
    for path, module in precision.model.named_modules():
        own = [each for each in module.parameters(recurse=False) if each.requires_grad]
        if not own or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for op in ops_of(precision, path):
            name = precision.policy.format_of(Site(path, op, 0))[0]
            if name in _NARROW:
                yield path, name, own
                break


def broken_layer(precision: Precision) -> str:
    """Return the layer nearest to the loss whose gradients are not finite; empty if there is none.

    A backward pass hands on what is not finite, so the one that it reaches first is where it began, or next to that.
    """
    last = ""
    for path, module in precision.model.named_modules():
        for each in module.parameters(recurse=False):
            if each.grad is not None and not bool(torch.isfinite(_local(each.grad)).all()):
                last = path
    return last


def broken_parameter(model: nn.Module) -> str:
    """Return the name of a parameter that is not finite; empty if all are. Reads all of them, waits once."""
    named = [(name, _local(each.detach())) for name, each in model.named_parameters() if each.is_floating_point()]
    if not named:
        return ""
    sums = torch.stack([each.sum(dtype=torch.float32).to(named[0][1].device) for _, each in named])
    if bool(torch.isfinite(sums.sum())):
        return ""
    return next((name for name, each in named if not bool(torch.isfinite(each).all())), "")


class Movement:
    """Which weights stored low an update moves: asked before the step, answered after it.

    Weights with an FP32 master or stochastic rounding lose no update, and groups with a learning rate of 0 are at rest.
    """

    def __init__(self, precision: Precision, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {parameter: name for name, parameter in precision.model.named_parameters()}
        self._before = [
            (names.get(each, "?"), each, _some(each.detach()).clone(), _some(each.grad) != 0)
            for optimizer in optimizers
            for group in optimizer.param_groups
            if float(group.get("lr", 1.0)) != 0.0
            for each in group["params"]
            if each.grad is not None and each.dtype in (torch.bfloat16, torch.float16) and stored(each) is None
        ]

    def frozen(self) -> tuple[str, float]:
        """Return the parameter of whose elements with a gradient the most did not move, and their fraction."""
        if not self._before:
            return "", 0.0
        counts = [
            torch.stack([((_some(each.detach()) == before) & has).sum(), has.sum()])
            for _, each, before, has in self._before
        ]
        numbers = torch.stack(counts).tolist()
        fractions = [still / moving if moving >= _FEWEST_MOVING else 0.0 for still, moving in numbers]
        worst = max(range(len(fractions)), key=fractions.__getitem__)
        return (self._before[worst][0], fractions[worst]) if fractions[worst] > 0 else ("", 0.0)


def checksum(model: nn.Module) -> float:
    """Return a number that is equal for equal weights, from a thousand elements of each."""
    sums = [_some(each.detach()).double().sum() for each in model.parameters() if each.is_floating_point()]
    return float(torch.stack(sums).sum()) if sums else 0.0


def ops_of(precision: Precision, path: str) -> Sequence[str]:
    """Return the ops of a module's own sites, as far as they are known: of a leaf its one, else those met so far."""
    module = precision.model.get_submodule(path)
    if type(module) in _OP_OF:
        return (_OP_OF[type(module)],)
    return tuple(plan.call.op.name for plan in precision.plans_of(path).plans.values() if plan.call.is_site)


def _some(tensor: Any) -> torch.Tensor:
    """Return up to 1024 elements of a tensor, evenly spread."""
    flat = _local(tensor.detach()).reshape(-1)
    return flat[:: max(flat.numel() // _MOST_ELEMENTS, 1)]


def _local(tensor: Any) -> torch.Tensor:
    """Return the shard of this rank, and the values of what is sparse."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.coalesce().values() if local.is_sparse else local
