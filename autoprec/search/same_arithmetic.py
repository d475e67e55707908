"""FP32 by other kernels: whether one step computes what strict FP32 computes, up to the order of sums.

Other layouts, fused optimizers and compiled code change no format. On a chaotic workload the loss curves drift apart
all the same, and no horizon that a search can pay for tells such a drift from a loss of steps. One step can: from the
same weights, on the same batch, gradients and updates differ by no more than those of FP32 itself do whose weights were
nudged by some roundings. Faulty kernels differ by far more.

Where a rectifier or a pooling decides, a perturbation of relative size e changes the decision of about that part of the
elements, and so gradients by its root: on the convolutional workloads of benchmarks/zoo/, channels last moves gradients
by 0.4 to 6 %, nudges of 1, 16 and 64 roundings by up to 0.5, 2 and 4 %.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far a first step lies from that of strict FP32: its gradients, and its updates of the weights.

    Each is the norm of the difference over that of FP32, held against its limit.
    """

    gradients: float
    gradients_limit: float
    updates: float
    updates_limit: float

    @property
    def holds(self) -> bool:
        """Return whether the step is FP32's up to the order of sums."""
        return self.gradients <= self.gradients_limit and self.updates <= self.updates_limit


def computes_in_fp32(policy: Policy) -> bool:
    """Return whether a policy changes no format, only the kernels that compute in FP32."""
    return coarsest_format(policy) == "fp32"


def agreement(train: Train, policy: Policy, device: str) -> Agreement:
    """Return how far a first step under `policy` is from strict FP32; `train(policy, nudge=...)` starts a run."""
    fp32 = preset("fp32", device)
    reference = _first_step(train(fp32))
    nudged = _first_step(train(fp32, nudge=_ROUNDINGS * rounding_of("fp32")))
    ours = _first_step(train(policy))
    steady = _steady(nudged.gradients, reference.gradients)
    return Agreement(
        gradients=_gap(ours.gradients, reference.gradients),
        gradients_limit=_FACTOR * _gap(nudged.gradients, reference.gradients) + _SUMS,
        updates=_gap(ours.updates, reference.updates, steady),
        updates_limit=_FACTOR * _gap(nudged.updates, reference.updates, steady) + _SUMS,
    )


def settled(fidelity: Fidelity, train: Train, policy: Policy, device: str) -> Fidelity:
    """Return `fidelity`, or where the curves cannot tell what FP32 by other kernels does, what its first step says."""
    if fidelity.verdict != "inconclusive" or not computes_in_fp32(policy):
        return fidelity
    found = agreement(train, policy, device)
    if not found.holds:
        return fidelity
    reason = (
        f"faithful: computes in FP32 by other kernels, whose first gradients are within {found.gradients:.1g} of "
        f"strict FP32's (limit {found.gradients_limit:.1g}); the curves alone are {fidelity.reason}"
    )
    return replace(fidelity, verdict="faithful", reason=reason, by_first_step=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    gradients: Tensors
    updates: Tensors


def _first_step(run: Training) -> _Step:
    """Return the gradients and the updates of the first step of a run, which is closed."""
    with run:
        before = {name: _copied(p) for name, p in run.model.named_parameters()}
        run.step()
        parameters = dict(run.model.named_parameters())
        gradients = {name: _copied(p.grad) for name, p in parameters.items() if p.grad is not None}
        return _Step(gradients=gradients, updates={name: _copied(p) - before[name] for name, p in parameters.items()})


def _steady(nudged: Tensors, reference: Tensors) -> frozenset[str]:
    """Return the parameters whose gradient is more than rounding: Adam makes full updates of that of others too."""
    return frozenset(
        name for name in nudged.keys() & reference.keys() if _gap(nudged, reference, frozenset({name})) <= _NOISE
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float64, copy=True)


def _gap(ours: Tensors, theirs: Tensors, names: Collection[str] | None = None) -> float:
    """Return the norm of the difference over that of `theirs`, of all tensors or those of `names`.

    Infinite where they are not of the same parameters.
    """
    if ours.keys() != theirs.keys():
        return float("inf")
    chosen = theirs.keys() if names is None else names
    squares = sum(float((ours[name] - theirs[name]).square().sum()) for name in chosen)
    norm = sum(float(theirs[name].square().sum()) for name in chosen)
    if not norm:
        return 0.0 if squares == 0 else float("inf")
    return float("inf") if math.isnan(squares) else (squares / norm) ** 0.5
