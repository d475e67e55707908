"""Which loss scale a run needs, from an FP32 backward pass on each batch and the exponents of its gradients.

Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2 and figure 3. What is added to it: a gradient is
called lost by the share of its norm that is flushed, not by the share of its elements. Sparse gradients of a healthy
step have many elements that are too small to matter; only where the norm goes does the direction go.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoprec.analysis.histogram import ExponentHistogram, exponent_histogram
from autoprec.analysis.stored_values import is_scaled, power_of_two_below
from autoprec.capture import Recording
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.numerics import Format, format_named

# The largest gradient of later batches may exceed that of the first by this factor before a step is skipped.
HEADROOM = 8.0
# A gradient that loses less than this fraction of its norm is as good as kept: rounding to 8 bits costs as much.
NEGLIGIBLE_NORM_FRAC = 0.1
# A gradient whose rounding errors are below this fraction of its norm, beyond what its digits cost anyway, is kept.
NEGLIGIBLE_ROUNDING = 0.05
# Clean steps before a dynamic scale grows, where it may halve so many times before gradients are lost again.
GROWTH_INTERVAL, _ROOMY = 2000, 4
_SHORTEST_INTERVAL = 100
_LARGEST_SCALE = 2.0**24


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientHistograms:
    """The exponents of the gradients of some steps: by parameter name, and of what each site returns, by site.

    `inner`: of gradients that the loss takes itself (`autograd.grad`), which exist before any loss scale is applied.
    """

    parameters: Mapping[str, ExponentHistogram]
    activations: Mapping[str, ExponentHistogram]
    inner: ExponentHistogram = field(default_factory=ExponentHistogram)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleAdvice:
    """What gradients in `format` need.

    `needed`: without a scale some gradient loses more than a tenth of its norm. `initial` is the largest power of two,
    up to 2**24, that keeps the largest gradient of all batches a factor `HEADROOM` within the format's range; gradients
    that are out of range without any scale do not count, they are `overflowing`. `minimum` is the smallest power of two
    with which every gradient is kept up to rounding errors of a twentieth of it, `maximum` the largest one with which
    the largest gradient is in range: if it is below `minimum`, no one scale serves all gradients. A dynamic scale
    should grow after `growth_interval` clean steps: sooner where few halvings lie between `initial` and `minimum`.
    `flush_frac`, `subnormal_frac`: fractions of the nonzero parameter-gradient elements that round to zero, or that
    lose digits or everything, without a scale; `scaled_flush_frac`: that still round to zero under `initial`.
    `lost`: the sites whose gradient loses more than a tenth of its norm, and which fraction, worst first.
    `forward_overflow`: sites that overflow before any gradient exists: no scale can help. `per_tensor`: the format is
    stored with a scale for every tensor, which does the work of a loss scale; `scaled_flush_frac` is then under those.
    `inner_max_abs`: the largest gradient that the loss takes itself, which no scale reaches; None if it takes none.
    """

    format: str
    needed: bool
    initial: float
    flush_frac: float
    subnormal_frac: float
    scaled_flush_frac: float
    max_abs: float
    lost: tuple[tuple[str, float], ...] = ()
    overflowing: tuple[str, ...] = ()
    minimum: float = 1.0
    maximum: float = _LARGEST_SCALE
    growth_interval: int = GROWTH_INTERVAL
    per_tensor: bool = False
    forward_overflow: tuple[str, ...] = ()
    inner_max_abs: float | None = None

    @property
    def saved_frac(self) -> float:
        """Return the fraction of the nonzero parameter-gradient elements that only the scale keeps from being zero."""
        return self.flush_frac - self.scaled_flush_frac

    @property
    def fits(self) -> bool:
        """Return whether one scale serves all gradients."""
        return self.minimum <= self.maximum


def run_backward(recordings: Sequence[Recording]) -> GradientHistograms:
    """Return the histograms of all gradients of recorded steps of one model; each takes a backward pass in FP32.

    The parameters' gradients of the last one stay in the model. Activations of the loss code are left out: it is
    scaled with.
    """
    activations: dict[str, ExponentHistogram] = {}
    parameters: dict[str, ExponentHistogram] = {}
    inner = ExponentHistogram()
    inside: set[str] = set()

    def watch(node: fx.Node, value: Any) -> None:
        nonlocal inner
        site = node.meta.get("site")
        if _is_inner(node, inside) and isinstance(value, torch.Tensor) and value.is_floating_point():
            inner += exponent_histogram(value)
        if site is None or site.module == LOSS_MODULE or not isinstance(value, torch.Tensor) or not value.requires_grad:
            return

        def note(gradient: torch.Tensor) -> None:
            activations[str(site)] = activations.get(str(site), ExponentHistogram()) + exponent_histogram(gradient)

        value.register_hook(note)

    for recording in recordings:
        inside.clear()
        recording.model.zero_grad(set_to_none=True)
        recording.replay(watch).backward()
        for name, tensor in recording.model.named_parameters():
            if tensor.grad is not None:
                parameters[name] = parameters.get(name, ExponentHistogram()) + exponent_histogram(tensor.grad)
    return GradientHistograms(parameters=parameters, activations=activations, inner=inner)


def _is_inner(node: fx.Node, inside: set[str]) -> bool:
    """Return whether a node returns gradients that the step takes itself; `inside` holds the names of those so far."""
    took = node.meta.get("op") == "grad" or (
        node.meta.get("op") == "getitem" and any(each.name in inside for each in node.all_input_nodes)
    )
    if took:
        inside.add(node.name)
    return took


def loss_scale_advice(
    gradients: GradientHistograms, format_name: str, forward_overflow: Iterable[Site] = ()
) -> LossScaleAdvice:
    """Return what the gradients need if they are stored in `format_name`.

    `forward_overflow` are the sites that overflow in the forward pass. Fractions are exact but for elements of exactly
    half the smallest number, which count as kept although they round to even, which is zero.
    """
    low = format_named(format_name)
    smallest = flush_exponent(low)
    total = sum(gradients.parameters.values(), ExponentHistogram())
    lost = {site: each.norm_frac_below(smallest) for site, each in gradients.activations.items()}
    lost = {site: frac for site, frac in lost.items() if frac > NEGLIGIBLE_NORM_FRAC}
    everything = [*gradients.parameters.items(), *gradients.activations.items()]
    largest = max((each.max_abs for _, each in everything if each.max_abs <= low.max), default=0.0)
    initial = largest_scale(largest, low)
    advice = LossScaleAdvice(
        format=format_name,
        needed=bool(lost) or total.norm_frac_below(smallest) > NEGLIGIBLE_NORM_FRAC,
        initial=initial,
        flush_frac=total.frac_below(smallest),
        subnormal_frac=total.frac_below(low.min_exponent),
        scaled_flush_frac=total.frac_below(smallest - round(math.log2(initial))),
        max_abs=total.max_abs,
        lost=tuple(sorted(lost.items(), key=lambda item: -item[1])),
        overflowing=tuple(name for name, each in everything if each.max_abs > low.max),
        forward_overflow=tuple(str(site) for site in forward_overflow),
        inner_max_abs=gradients.inner.max_abs if gradients.inner.counts else None,
    )
    if is_scaled(low):
        flushed = _flushed_under_own_scales(gradients.parameters.values(), low)
        return replace(
            advice, needed=False, initial=1.0, maximum=1.0, scaled_flush_frac=flushed, lost=(), overflowing=(),
            per_tensor=True,
        )  # fmt: skip
    minimum = smallest_scale([total, *gradients.activations.values()], low)
    maximum = largest_scale(largest, low, headroom=1.0)
    return replace(advice, minimum=minimum, maximum=maximum, growth_interval=_growth_interval(minimum, initial))


def _growth_interval(minimum: float, initial: float) -> int:
    """Return after how many clean steps to grow: half as many for each halving that is missing to `_ROOMY`."""
    room = round(math.log2(initial / minimum))
    return max(GROWTH_INTERVAL >> max(_ROOMY - room, 0), _SHORTEST_INTERVAL)


def _flushed_under_own_scales(histograms: Iterable[ExponentHistogram], low: Format) -> float:
    """Return the fraction of nonzero elements that are zero if each tensor's largest is scaled to that of `low`."""
    flushed, total = 0.0, 0
    for each in histograms:
        scale = power_of_two_below(low.max, each.max_abs)
        flushed += each.num_nonzero * each.frac_below(flush_exponent(low) - round(math.log2(scale)))
        total += each.num_nonzero
    return flushed / max(total, 1)


def flush_exponent(low: Format) -> int:
    """Return the k for which everything below 2**k rounds to zero in `low`: half its smallest number."""
    return low.min_exponent - low.mantissa_bits - 1


def largest_scale(max_abs: float, low: Format, headroom: float = HEADROOM) -> float:
    """Return the largest power of two, up to 2**24, with `max_abs` times it a factor `headroom` within `low`."""
    if max_abs == 0:
        return _LARGEST_SCALE
    mantissa, exponent = math.frexp(low.max / headroom / max_abs)
    return float(min(math.ldexp(1.0, exponent - 1), _LARGEST_SCALE)) if mantissa else 0.0


def smallest_scale(histograms: Sequence[ExponentHistogram], low: Format) -> float:
    """Return the smallest power of two from 1 with which no gradient's rounding errors matter.

    At most 2**60: a gradient whose rounding errors no scale makes small is spread wider than the format.
    """
    allowed = NEGLIGIBLE_ROUNDING + low.unit_roundoff
    for exponent in range(61):
        if all(rounding_error(each, low, exponent) <= allowed for each in histograms):
            return math.ldexp(1.0, exponent)
    return 2.0**60


def rounding_error(histogram: ExponentHistogram, low: Format, exponent: int = 0) -> float:
    """Return the expected error of rounding a gradient times 2**`exponent` to `low`, as a fraction of its norm.

    Rounding errors are taken to be uniform: their mean square is the spacing's over 12, and never more than the
    element's own. Elements lie evenly in the logarithm within their bin, where the mean square is 3 / (2 ln 2) 4**k.
    Overflow is not looked at.
    """
    if not histogram.counts:
        return 0.0
    top = histogram.counts[-1][0]
    mean_square = 3 / (2 * math.log(2))
    errors, squares = 0.0, 0.0
    for k, count in histogram.counts:
        square = mean_square * 4.0 ** (k - top)
        spacing = max(k + exponent, low.min_exponent) - low.mantissa_bits - exponent
        errors += count * min(4.0 ** min(spacing - top, 500) / 12, square)
        squares += count * square
    return math.sqrt(errors / squares)
