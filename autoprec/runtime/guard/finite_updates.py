"""Which optimizers cannot make an update that is not finite out of finite gradients: one row a class, with its proof.

What is taken for granted: gradients up to `GRADIENT_LIMIT`, which each step checks; weights up to the row's `weights`,
which are looked at; and a state that such steps have made, which is looked at when it is there already. Then no element
of a weight moves further in a step than `furthest` says, whatever the gradients were. The proof is for weights, state
and gradients in FP32 or bf16, which has its range: `unit` below is the unit roundoff. What is not proven is watched.

An overflow that the rows allow is that of a sum of squares: m / sqrt(inf) is an update of 0, not NaN, and inf * beta2
stays inf as long as beta2 is above 0. The algorithms are those of torch.optim: the loops, foreach and fused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from autoprec.runtime.finite import GRADIENT_LIMIT
from autoprec.runtime.guard import remembered
from autoprec.runtime.guard.remembered import FLUSHED, State
from autoprec.runtime.optimizer_step import has_hooks_of_others
from autoprec.runtime.stored import stored

# Weights of optimizers that square gradients: with weight decay up to 1, (2**60 + 2**62)**2 is still an FP32 number.
_SQUARED = 2.0**62
_PLAIN = 2.0**80
_SLOWEST = 1.0 - 2.0**-10  # the beta1 that `FLUSHED` is for
# What the products and quotients of one update round up to in bf16: ten times (1 + 2**-9)
_ROUNDED = 1.02

Group = Mapping[str, Any]
Numbers = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One optimizer: what it must not be set to, and how far a step moves a weight at most.

    `memory` bounds the first moment, or momentum, relative to what divides it: what the steps of these hyperparameters
    keep. `measured` is the same number of a state as it is; not a number for a state that no steps have made.
    """

    fault: Callable[[Numbers, float], str]
    memory: Callable[[Numbers, float], float]
    measured: Callable[[State], torch.Tensor]
    furthest: Callable[[Numbers, float, float], float]
    weights: float = _SQUARED


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """No element moves further than `furthest` in a step, while none is above `weights` and memory is `memory`."""

    furthest: float
    weights: float
    memory: float


def unproven(optimizer: Optimizer, group: Group) -> str:
    """Return why a group's updates may be not finite although its gradients are; empty if they cannot."""
    row = ROWS.get(type(optimizer))
    if row is None:
        return f"nothing is proven about the updates of {type(optimizer).__name__}"
    if has_hooks_of_others(optimizer):
        return "a hook of its step may change gradients or weights after they were looked at"
    for name in ("capturable", "differentiable"):
        if group.get(name):
            return (
                f"{name}=True computes the update in another way, which is not proven (0 / 0 at a learning rate of 0)"
            )
    unit = unit_of(group)
    if unit is None:
        return "it steps on weights in another format than FP32 and bf16, and what has less range overflows sooner"
    if not all(math.isfinite(each) for each in _numbers(group).values()):
        return "a hyperparameter is not finite"
    return row.fault(_numbers(group), unit)


def bound(optimizer: Optimizer, group: Group, memory: float) -> Bound:
    """Return how far a step of a proven group goes, whose state remembers `memory` at most."""
    row, numbers, unit = ROWS[type(optimizer)], _numbers(group), unit_of(group) or 0.0
    memory = max(memory, row.memory(numbers, unit))
    furthest = _ROUNDED * row.furthest(numbers, unit, memory)
    return Bound(furthest=furthest, weights=row.weights, memory=memory)


def measured(optimizer: Optimizer, group: Group) -> torch.Tensor | None:
    """Return what the state of a proven group remembers, as a number on its device; None if there is no state yet."""
    row = ROWS[type(optimizer)]
    found = [row.measured(_local(state)) for each in group["params"] if (state := optimizer.state.get(each))]
    if not found:
        return None
    return torch.stack([each.to(found[0].device, torch.float64) for each in found]).max()


def unit_of(group: Group) -> float | None:
    """Return the coarsest unit roundoff of what a group steps on; None if that has less range than FP32."""
    formats = {torch.float32 if stored(each) is not None else each.dtype for each in group["params"]}
    units = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
    return max((units[each] for each in formats), default=2.0**-24) if formats <= units.keys() else None


def _numbers(group: Group) -> Numbers:
    """Return the hyperparameters as numbers; a learning rate on a GPU is waited for, and its caller asks rarely."""
    found = {name: value for name, value in group.items() if name != "params" and _is_number(value)}
    betas = group.get("betas", ())
    found.update({f"beta{number}": float(beta) for number, beta in enumerate(betas, 1)})
    return {name: float(value) for name, value in found.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _local(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state: their shards of this rank, and of sparse ones the values."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in tensors.items()}
    return {name: value.coalesce().values() if value.is_sparse else value for name, value in local.items()}


# Faults: settings for which the proofs below do not hold.


def _no_decay_fault(numbers: Numbers) -> str:
    decay, rate = numbers.get("weight_decay", 0.0), numbers["lr"]
    if not 0 <= decay <= 1:
        return f"weight_decay is {decay:g}, and proven are 0 to 1"
    if not 0 <= rate * decay <= 1:
        return f"lr * weight_decay is {rate * decay:g}, and beyond 0 to 1 weights may grow with each step"
    return ""


def _adaptive_fault(numbers: Numbers) -> str:
    eps = numbers["eps"]
    if not eps >= 2.0**-100:  # in FP32 less may be flushed to 0
        return f"eps is {eps:g}: where every gradient so far is 0, or its square, the update is 0 / 0"
    return _no_decay_fault(numbers)


def _adam_fault(numbers: Numbers, unit: float) -> str:
    first, second = _moments(numbers, unit)
    if not (0 <= first < _SLOWEST and 0 < numbers["beta2"] < 1 - 2.0**-20 and first**2 < second):
        return (
            f"betas are ({numbers['beta1']:g}, {numbers['beta2']:g}): proven are beta1 below 1 - 2**-10 and beta1**2 "
            "below beta2, or else the first moment outlives the second"
        )
    return _adaptive_fault(numbers)


def _nadam_fault(numbers: Numbers, unit: float) -> str:
    if numbers["momentum_decay"] < 0:
        return f"momentum_decay is {numbers['momentum_decay']:g}, and below 0 its products may reach 1"
    return _adam_fault(numbers, unit)


def _adamax_fault(numbers: Numbers, unit: float) -> str:
    first, second = _moments(numbers, unit)
    if not (0 <= first < _SLOWEST and first < second and numbers["beta2"] < 1):
        return (
            f"betas are ({numbers['beta1']:g}, {numbers['beta2']:g}): proven are beta1 below 1 - 2**-10 and below "
            "beta2, or else the first moment outlives the largest gradient"
        )
    return _adaptive_fault(numbers)


def _adagrad_fault(numbers: Numbers, unit: float) -> str:  # noqa: ARG001 one signature for all rows
    if numbers["lr_decay"] < 0:
        return f"lr_decay is {numbers['lr_decay']:g}, and 1 + (step - 1) * lr_decay may be 0"
    return _adaptive_fault(numbers)


def _rmsprop_fault(numbers: Numbers, unit: float) -> str:
    if numbers.get("centered"):
        return "centered=True takes the root of a difference, which rounding can make negative"
    if not 0 < numbers["alpha"] < 1 - 2.0**-20:
        return f"alpha is {numbers['alpha']:g}, and proven are 0 to 1 - 2**-20"
    return _momentum_fault(numbers, unit) or _adaptive_fault(numbers)


def _sgd_fault(numbers: Numbers, unit: float) -> str:
    return _momentum_fault(numbers, unit) or _no_decay_fault(numbers)


def _momentum_fault(numbers: Numbers, unit: float) -> str:
    if not 0 <= numbers["momentum"] * (1 + 4 * unit) < _SLOWEST:
        return f"momentum is {numbers['momentum']:g}, and what it sums has no bound from about 1 on"
    return ""


# Bounds. A product or sum of torch's rounds once; (1 + 4 unit) covers the few that a moment takes in a step.


def _moments(numbers: Numbers, unit: float) -> tuple[float, float]:
    """Return beta1 as large, and beta2 as small, as rounding can make them."""
    return numbers["beta1"] * (1 + 4 * unit), numbers["beta2"] * (1 - 4 * unit)


def _adam_memory(numbers: Numbers, unit: float) -> float:
    """Return K with |m| <= K (sqrt(v) + flushed) after every step, if it was so before.

    |b1 m + (1 - b1) g| <= b1 K sqrt(v) + (1 - b1) |g| <= sqrt(b2 v + (1 - b2) g**2) sqrt(b1**2 K**2 / b2 +
    (1 - b1)**2 / (1 - b2)) by Cauchy and Schwarz; the last root is K where K**2 = (1 - b1)**2 / ((1 - b2)
    (1 - b1**2 / b2)). Kingma and Ba (2015), section 2.1, have (1 - b1) / sqrt(1 - b2) for one gradient among zeros.
    """
    first, second = _moments(numbers, unit)
    one, other = (1 - numbers["beta1"]) * (1 + 4 * unit), (1 - numbers["beta2"]) * (1 - 4 * unit)
    return one / math.sqrt(other * (1 - first**2 / second))


def _adam_furthest(numbers: Numbers, unit: float, memory: float) -> float:  # noqa: ARG001
    """Return lr / (1 - b1) * |m| / (sqrt(v) + eps) at most; both bias corrections are fractions."""
    return abs(numbers["lr"]) / (1 - numbers["beta1"]) * memory * (1 + FLUSHED / numbers["eps"])


def _nadam_furthest(numbers: Numbers, unit: float, memory: float) -> float:
    """Return that of Adam, and of the last gradient: |g| <= sqrt(v / (1 - b2)). Products of mu are below b1."""
    last = 1 / math.sqrt((1 - numbers["beta2"]) * (1 - 4 * unit))
    return _adam_furthest(numbers, unit, memory + last)


def _radam_furthest(numbers: Numbers, unit: float, memory: float) -> float:
    """Return that of Adam, or lr m / (1 - b1) of its first steps, which divide by nothing. Rectifying is below 1."""
    first_steps = abs(numbers["lr"]) / (1 - numbers["beta1"]) * 2 * _gradient(numbers, _SQUARED)
    return max(_adam_furthest(numbers, unit, memory), first_steps)


def _adamax_memory(numbers: Numbers, unit: float) -> float:
    """Return K with |m| <= K u: b1 K u + (1 - b1) |g| <= u' (b1 K / b2 + 1 - b1), as u' is at least b2 u and |g|."""
    first, second = _moments(numbers, unit)
    return (1 - numbers["beta1"]) * (1 + 4 * unit) / (1 - first / second)


def _adamax_furthest(numbers: Numbers, unit: float, memory: float) -> float:  # noqa: ARG001
    return abs(numbers["lr"]) / (1 - numbers["beta1"]) * memory


def _nothing(numbers: Numbers, unit: float) -> float:  # noqa: ARG001
    return 0.0


def _adagrad_furthest(numbers: Numbers, unit: float, memory: float) -> float:  # noqa: ARG001
    """Return lr |g| / (sqrt(sum) + eps) at most: the sum has the square of the last gradient in it."""
    return abs(numbers["lr"]) * (1 + 4 * unit) * (1 + FLUSHED / numbers["eps"])


def _rmsprop_memory(numbers: Numbers, unit: float) -> float:
    """Return what |g| / (sqrt(v) + eps) <= 1 / sqrt(1 - alpha) sums up to under momentum."""
    last = 1 / math.sqrt((1 - numbers["alpha"]) * (1 - 4 * unit)) * (1 + FLUSHED / numbers["eps"])
    return last / (1 - numbers["momentum"] * (1 + 4 * unit))


def _rmsprop_furthest(numbers: Numbers, unit: float, memory: float) -> float:  # noqa: ARG001
    return abs(numbers["lr"]) * memory


def _sgd_memory(numbers: Numbers, unit: float) -> float:
    """Return the momentum that gradients at their limit, and weights at theirs, sum up to."""
    fresh = max(1.0, abs(1 - numbers["dampening"])) * _gradient(numbers, _PLAIN)
    return fresh / (1 - numbers["momentum"] * (1 + 4 * unit))


def _sgd_furthest(numbers: Numbers, unit: float, memory: float) -> float:  # noqa: ARG001
    return abs(numbers["lr"]) * (_gradient(numbers, _PLAIN) + memory)


def _gradient(numbers: Numbers, weights: float) -> float:
    return GRADIENT_LIMIT + numbers.get("weight_decay", 0.0) * weights


ROWS: Mapping[type[Optimizer], Row] = MappingProxyType(
    {
        Adam: Row(fault=_adam_fault, memory=_adam_memory, measured=remembered.adam, furthest=_adam_furthest),
        AdamW: Row(fault=_adam_fault, memory=_adam_memory, measured=remembered.adam, furthest=_adam_furthest),
        NAdam: Row(fault=_nadam_fault, memory=_adam_memory, measured=remembered.nadam, furthest=_nadam_furthest),
        RAdam: Row(fault=_adam_fault, memory=_adam_memory, measured=remembered.adam, furthest=_radam_furthest),
        Adamax: Row(fault=_adamax_fault, memory=_adamax_memory, measured=remembered.adamax, furthest=_adamax_furthest),
        Adagrad: Row(fault=_adagrad_fault, memory=_nothing, measured=remembered.adagrad, furthest=_adagrad_furthest),
        RMSprop: Row(
            fault=_rmsprop_fault, memory=_rmsprop_memory, measured=remembered.rmsprop, furthest=_rmsprop_furthest
        ),
        SGD: Row(fault=_sgd_fault, memory=_sgd_memory, measured=remembered.sgd, furthest=_sgd_furthest, weights=_PLAIN),
    }
)
