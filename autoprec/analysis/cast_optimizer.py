"""An optimizer on parameters that were cast, as `model.half()` does: state and arithmetic are as low as they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoprec.analysis.optimizer_twin import Twin
from autoprec.analysis.short_run import ShortRun
from autoprec.numerics import format_named, round_scalar
from autoprec.runtime.dtypes import torch_dtype

# A step this many times as large as the largest of FP32 divides by what is left of eps.
_RUNAWAY = 10.0
_LARGER_EPS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


@dataclass(frozen=True, kw_only=True, slots=True)
class CastOptimizer:
    """What steps on cast parameters do, with state of the same dtype.

    `nonfinite_frac`: by name, which fraction of a parameter is not finite afterwards; only parameters that have some.
    `step_growth`: how many times larger the largest step is than in FP32, of what stays finite. `larger_eps`: the
    smallest power of ten, as eps, with which all stays finite and no step is far larger than in FP32; None if none is,
    or none is needed.
    """

    format: str
    eps: float | None
    eps_in_format: float | None
    nonfinite_frac: dict[str, float]
    step_growth: float
    larger_eps: float | None = None

    @property
    def eps_vanishes(self) -> bool:
        """Return whether the format has no number for eps other than zero."""
        return bool(self.eps) and self.eps_in_format == 0


def cast_optimizers(run: ShortRun, formats: Sequence[str]) -> tuple[CastOptimizer, ...]:
    """Return what steps on parameters cast to each format do; nothing for 8 bit formats, in which nothing computes."""
    if run.num_steps == 0 or not run.parameters:
        return ()
    wide = [name for name in formats if format_named(name).storage_bits == 16]
    found = (_cast(run, name) for name in wide)
    return tuple(each for each in found if each is not None)


def _cast(run: ShortRun, format_name: str) -> CastOptimizer | None:
    eps = _eps(run.optimizer)
    ends = _ends(run, format_name, None)
    if ends is None:
        return None
    broken = _nonfinite(run, ends)
    growth = _growth(run, ends, format_name)
    larger = None
    if eps and (broken or growth > _RUNAWAY):
        larger = next((each for each in _LARGER_EPS if each > eps and _holds(run, format_name, each)), None)
    return CastOptimizer(
        format=format_name,
        eps=eps,
        eps_in_format=None if eps is None else round_scalar(eps, format_named(format_name)),
        nonfinite_frac=broken,
        step_growth=growth,
        larger_eps=larger,
    )


def _ends(run: ShortRun, format_name: str, eps: float | None) -> list[torch.Tensor] | None:
    """Return the parameters after the steps of the run; None if this optimizer cannot step in the format."""
    twin = run.twin(torch_dtype(format_name))
    if eps is not None:
        _set_eps(twin, eps)
    try:
        for step in range(run.num_steps):
            twin.step(run.gradients(step))
    except (RuntimeError, TypeError, ValueError):
        return None
    return [value.float() for value in twin.values()]


def _holds(run: ShortRun, format_name: str, eps: float) -> bool:
    ends = _ends(run, format_name, eps)
    return ends is not None and not _nonfinite(run, ends) and _growth(run, ends, format_name) <= _RUNAWAY


def _nonfinite(run: ShortRun, ends: Sequence[torch.Tensor]) -> dict[str, float]:
    fracs = {
        each.name: float((~end.isfinite()).float().mean())
        for each, end in zip(run.parameters, ends, strict=True)
        if end.numel()
    }
    return {name: value for name, value in fracs.items() if value > 0}


def _growth(run: ShortRun, ends: Sequence[torch.Tensor], format_name: str) -> float:
    """Return the largest movement in units of the largest of FP32; a spacing of the format is no movement."""
    growth = 0.0
    unit = format_named(format_name).eps
    for each, end in zip(run.parameters, ends, strict=True):
        start, finite = each.values[0], end.isfinite()
        low = ((end - start).abs() - unit * start.abs())[finite]
        way = (each.values[-1] - start).abs()
        if low.numel() and bool((way > 0).any()):
            growth = max(growth, float(low.max()) / float(way.max()))
    return growth if math.isfinite(growth) else math.inf


def _eps(optimizer: torch.optim.Optimizer) -> float | None:
    value = optimizer.param_groups[0].get("eps")
    return float(value) if isinstance(value, int | float) else None


def _set_eps(twin: Twin, eps: float) -> None:
    for group in twin.optimizer.param_groups:
        group["eps"] = eps
