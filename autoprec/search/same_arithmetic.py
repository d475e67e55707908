"""FP32 by other kernels: whether its first steps compute what strict FP32 computes, up to the order of sums.

Other layouts, fused optimizers and compiled code change no format. On a chaotic workload the loss curves drift apart
all the same, and no horizon that a search can pay for tells such a drift from a loss of steps. Steps can, one part at
a time. From the same weights, on the same batch, the gradients of each parameter differ by no more than those of FP32
itself do whose weights were nudged by some roundings. And from the same weights and the same gradients, those of FP32,
an optimizer makes the same updates but for the rounding of each: nothing is chaotic there, so that a frozen layer,
another `eps` or weight decay shows, and in the second step what it keeps between steps. Faulty kernels differ by more.

Where a rectifier or a pooling decides, a perturbation of relative size e changes the decision of about that part of the
elements, and so gradients by its root: on the convolutional workloads of benchmarks/zoo/, channels last moves gradients
by 0.4 to 6 %, nudges of 1, 16 and 64 roundings by up to 0.5, 2 and 4 %.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from autoprec.measure import Fidelity, Training
from autoprec.policy import Policy, preset
from autoprec.search.baselines import coarsest_format, rounding_of

Train: TypeAlias = Callable[..., Training]
Tensors: TypeAlias = Mapping[str, torch.Tensor]

# Another order of some hundred terms of a sum is off by about as many roundings as their root.
_ROUNDINGS = 16
# One nudge scatters by some factor around what another order of sums does.
_FACTOR = 16.0
# And where a nudge moves nothing, sums of a thousand terms still differ by this much.
_SUMS = 2.0**-14
_NOISE = 2.0**-4
# An update takes some ten roundings, and one where it is added to the weight: by half an ulp in either run.
_UPDATE, _ULPS = 2.0**-17, 2 * 2.0**-23
# The first step shows what an optimizer makes of a gradient, the second what it remembers.
_NUM_STEPS = 2
# Chaos parts two FP32 runs by amounts that scatter; channels last was 1.2 times as far off as FP32 nudged by one
# rounding on the depthwise workload of benchmarks/zoo/, and a nudge of 16 roundings 1.5 times (root mean square).
_CHAOS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far first steps lie from those of strict FP32: gradients of the first, and updates made of FP32's gradients.

    Each is the norm of the difference over that of FP32, at the parameter that is the furthest beyond its limit.
    """

    gradients: float
    gradients_limit: float
    updates: float
    updates_limit: float

    @property
    def holds(self) -> bool:
        """Return whether the steps are FP32's up to the order of sums."""
        return self.gradients <= self.gradients_limit and self.updates <= self.updates_limit


def computes_in_fp32(policy: Policy) -> bool:
    """Return whether a policy changes no format, only the kernels that compute in FP32."""
    return coarsest_format(policy) == "fp32"


def drifts_as_chaos(reference: Sequence[float], candidate: Sequence[float], nudged: Sequence[float]) -> bool:
    """Return whether a curve is about as far from FP32's as that of FP32 nudged by one rounding: nothing can be told.

    Differences are those of single steps, over the last half; curves that are not finite are no such drift.
    """
    last = len(candidate) // 2
    ours, theirs = (np.subtract(each[: len(candidate)], reference[: len(candidate)]) for each in (candidate, nudged))
    far, near = (float(np.sqrt(np.square(each[last:]).mean())) for each in (ours, theirs))
    return math.isfinite(far) and far <= _CHAOS * near


def agreement(train: Train, policy: Policy, device: str) -> Agreement:
    """Return how far first steps under `policy` are from strict FP32; `train(policy, nudge=...)` starts a run."""
    fp32 = preset("fp32", device)
    reference = _steps(train(fp32), _NUM_STEPS)
    (nudged,) = _steps(train(fp32, nudge=_ROUNDINGS * rounding_of("fp32")), 1)
    ours = _steps(train(policy), _NUM_STEPS, reference)
    gradients, gradients_limit = _worst(_gradient_gaps(ours[0], reference[0], nudged))
    updates, updates_limit = _worst(
        [gap for one, other in zip(ours, reference, strict=True) for gap in _update_gaps(one, other)]
    )
    return Agreement(gradients=gradients, gradients_limit=gradients_limit, updates=updates, updates_limit=updates_limit)


def settled(
    fidelity: Fidelity, train: Train, policy: Policy, device: str, *, is_chaotic: Callable[[], bool] = lambda: False
) -> Fidelity:
    """Return `fidelity`, or where the curves cannot tell what FP32 by other kernels does, what its first steps say.

    Curves cannot tell where they are inconclusive, and where FP32 nudged by one rounding drifts as far: `is_chaotic` is
    asked where the verdict is unfaithful.
    """
    is_open = fidelity.verdict == "inconclusive"
    if fidelity.verdict == "faithful" or not computes_in_fp32(policy) or not (is_open or is_chaotic()):
        return fidelity
    found = agreement(train, policy, device)
    if not found.holds:
        return fidelity
    drift = "" if is_open else ", and FP32 nudged by one rounding drifts as far"
    reason = (
        f"faithful: computes in FP32 by other kernels, whose first gradients are within {found.gradients:.1g} of "
        f"strict FP32's (limit {found.gradients_limit:.1g}), and whose updates from equal gradients are within "
        f"{found.updates:.1g} (limit {found.updates_limit:.1g}); the curves alone are {fidelity.reason}{drift}"
    )
    return replace(fidelity, verdict="faithful", reason=reason, by_first_step=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The weights that a step began with, the gradients that its optimizer was given, and what that added to them."""

    weights: Tensors
    gradients: Tensors
    updates: Tensors


def _steps(run: Training, count: int, follow: Sequence[_Step] = ()) -> tuple[_Step, ...]:
    """Return the first steps of a run, which is closed.

    With `follow`, the optimizer is given its gradients in each of them, so that the weights stay equal up to rounding.
    """
    with run:
        parameters = dict(run.model.named_parameters())
        return tuple(_step(run, parameters, follow[number] if follow else None) for number in range(count))


def _step(run: Training, parameters: Mapping[str, torch.nn.Parameter], follow: _Step | None) -> _Step:
    gradients: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        for name, p in parameters.items():
            if p.grad is not None:
                gradients[name] = _copied(p.grad)
                if follow is not None and name in follow.gradients:
                    p.grad.copy_(follow.gradients[name])

    weights = {name: _copied(p) for name, p in parameters.items()}
    hook = run.optimizer.register_step_pre_hook(look)
    run.step()
    hook.remove()
    updates = {name: _copied(p) - weights[name] for name, p in parameters.items()}
    return _Step(weights=weights, gradients=gradients, updates=updates)


_Gap: TypeAlias = tuple[float, float]
"""How far a parameter is off, and the limit of that."""


def _gradient_gaps(ours: _Step, reference: _Step, nudged: _Step) -> list[_Gap]:
    """Return the gaps of the gradients that are more than rounding, whose nudged ones say how far they may be off.

    One nudge may leave a parameter alone by chance, so that the mean over all of them counts as well.
    """
    if not ours.gradients.keys() == reference.gradients.keys() == nudged.gradients.keys():
        return [(math.inf, 0.0)]
    moved = {name: _gap([nudged.gradients[name]], [each]) for name, each in reference.gradients.items()}
    common = _gap(list(nudged.gradients.values()), [reference.gradients[name] for name in nudged.gradients])
    steady = [name for name, gap in moved.items() if gap <= _NOISE]
    limits = {name: _FACTOR * max(moved[name], common) + _SUMS for name in steady}
    return [(_gap([ours.gradients[name]], [reference.gradients[name]]), limits[name]) for name in steady]


def _update_gaps(ours: _Step, reference: _Step) -> list[_Gap]:
    gaps = []
    for name, update in reference.updates.items():
        size = float(update.double().norm())
        limit = _UPDATE + (_ULPS * float(reference.weights[name].double().norm()) / size if size else 0.0)
        gaps.append((_gap([ours.updates[name]], [update]), limit))
    return gaps


def _worst(gaps: Collection[_Gap]) -> _Gap:
    """Return the gap that is the furthest beyond its limit, or nearest to it; none at all is no agreement."""
    return max(gaps, key=lambda gap: gap[0] / gap[1] if gap[1] else gap[0], default=(math.inf, 0.0))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True)


def _gap(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over that of `theirs`, of some tensors together."""
    pairs = list(zip(ours, theirs, strict=True))
    squares = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    norm = sum(float(other.double().square().sum()) for _, other in pairs)
    if not norm:
        return 0.0 if squares == 0 else math.inf
    return math.inf if math.isnan(squares) else math.sqrt(squares / norm)
