"""Which loss scale a step needs, from one FP32 backward pass and the exponents of its gradients.

Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2 and figure 3. What is added to it: a gradient is
called lost by the share of its norm that is flushed, not by the share of its elements. Sparse gradients of a healthy
step have many elements that are too small to matter; only where the norm goes does the direction go.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoprec.analysis.histogram import ExponentHistogram, exponent_histogram
from autoprec.capture import Recording
from autoprec.graph.site import LOSS_MODULE
from autoprec.numerics import Format, format_named

# The largest gradient of later batches may exceed that of the first by this factor before a step is skipped.
HEADROOM = 8.0
# A gradient that loses less than this fraction of its norm is as good as kept: rounding to 8 bits costs as much.
NEGLIGIBLE_NORM_FRAC = 0.1
_LARGEST_SCALE = 2.0**24


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientHistograms:
    """The exponents of the gradients of one step: by parameter name, and of what each site returns, by site."""

    parameters: Mapping[str, ExponentHistogram]
    activations: Mapping[str, ExponentHistogram]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleAdvice:
    """What gradients in `format` need.

    `needed`: without a scale some gradient loses more than a tenth of its norm. `initial` is the largest power of two,
    up to 2**24, that keeps the largest gradient a factor `HEADROOM` within the format's range; gradients that are out
    of range without any scale do not count, they are `overflowing`.
    `flush_frac`, `subnormal_frac`: fractions of the nonzero parameter-gradient elements that round to zero, or that
    lose digits or everything, without a scale; `scaled_flush_frac`: that still round to zero under `initial`.
    `lost`: the sites whose gradient loses more than a tenth of its norm, and which fraction, worst first.
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


def run_backward(recording: Recording) -> GradientHistograms:
    """Return the histograms of all gradients of the recorded step, of which one backward pass is run in FP32.

    The parameters' gradients stay in `recording.model`. Activations of the loss code are left out: it is scaled with.
    """
    activations: dict[str, ExponentHistogram] = {}

    def watch(node: fx.Node, value: Any) -> None:
        site = node.meta.get("site")
        if site is None or site.module == LOSS_MODULE or not isinstance(value, torch.Tensor) or not value.requires_grad:
            return

        def note(gradient: torch.Tensor) -> None:
            activations[str(site)] = activations.get(str(site), ExponentHistogram()) + exponent_histogram(gradient)

        value.register_hook(note)

    recording.model.zero_grad(set_to_none=True)
    recording.replay(watch).backward()
    named = recording.model.named_parameters()
    parameters = {name: exponent_histogram(tensor.grad) for name, tensor in named if tensor.grad is not None}
    return GradientHistograms(parameters=parameters, activations=activations)


def loss_scale_advice(gradients: GradientHistograms, format_name: str) -> LossScaleAdvice:
    """Return what the gradients need if they are stored in `format_name`.

    Fractions are exact but for elements of exactly half the smallest number, which count as kept although they round
    to even, which is zero.
    """
    low = format_named(format_name)
    smallest = flush_exponent(low)
    total = sum(gradients.parameters.values(), ExponentHistogram())
    lost = {site: each.norm_frac_below(smallest) for site, each in gradients.activations.items()}
    lost = {site: frac for site, frac in lost.items() if frac > NEGLIGIBLE_NORM_FRAC}
    everything = [*gradients.parameters.items(), *gradients.activations.items()]
    largest = max((each.max_abs for _, each in everything if each.max_abs <= low.max), default=0.0)
    initial = largest_scale(largest, low)
    return LossScaleAdvice(
        format=format_name,
        needed=bool(lost) or total.norm_frac_below(smallest) > NEGLIGIBLE_NORM_FRAC,
        initial=initial,
        flush_frac=total.frac_below(smallest),
        subnormal_frac=total.frac_below(low.min_exponent),
        scaled_flush_frac=total.frac_below(smallest - round(math.log2(initial))),
        max_abs=total.max_abs,
        lost=tuple(sorted(lost.items(), key=lambda item: -item[1])),
        overflowing=tuple(name for name, each in everything if each.max_abs > low.max),
    )


def flush_exponent(low: Format) -> int:
    """Return the k for which everything below 2**k rounds to zero in `low`: half its smallest number."""
    return low.min_exponent - low.mantissa_bits - 1


def largest_scale(max_abs: float, low: Format) -> float:
    """Return the largest power of two, up to 2**24, with `max_abs` times it a factor `HEADROOM` within `low`."""
    if max_abs == 0:
        return _LARGEST_SCALE
    mantissa, exponent = math.frexp(low.max / HEADROOM / max_abs)
    return float(min(math.ldexp(1.0, exponent - 1), _LARGEST_SCALE)) if mantissa else 0.0
