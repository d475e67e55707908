"""What an optimizer's state remembers of earlier gradients, as one number that `finite_updates` has a bound for."""

from collections.abc import Mapping

import torch

# Below the smallest normal number, 2**-126, squares lose their digits, or are flushed: v lacks up to 2**-125 a step. A
# first moment that has the root of v for a bound has it up to 2 * sqrt(2**-125) / (1 - beta1), with beta1 < 1 - 2**-10.
FLUSHED = 2.0**-51

State = Mapping[str, torch.Tensor]


def adam(state: State) -> torch.Tensor:
    """Return |m| / (sqrt(v) + flushed) at most; not a number where v, or its maximum, is below 0 or none."""
    ratio = state["exp_avg"].abs() / (state["exp_avg_sq"].sqrt() + FLUSHED)
    return _largest(ratio) + 0 * _root_of_finite(state, "max_exp_avg_sq")


def nadam(state: State) -> torch.Tensor:
    """Return that of Adam; not a number where the product of mu is no fraction."""
    product = state["mu_product"]
    return adam(state) + 0 * (product.sqrt() + (1 - product).sqrt()).to(state["exp_avg"].device)


def adamax(state: State) -> torch.Tensor:
    """Return |m| / u at most; not a number where u is not above 0."""
    return _largest(torch.where(state["exp_inf"] > 0, state["exp_avg"].abs() / state["exp_inf"], torch.nan))


def adagrad(state: State) -> torch.Tensor:
    """Return 0; not a number where the sum of squares is below 0 or none."""
    return 0 * _root_of_finite(state, "sum")


def rmsprop(state: State) -> torch.Tensor:
    """Return the largest momentum; not a number where v is below 0 or none."""
    buffer = state.get("momentum_buffer", state["square_avg"][:0])
    return _largest(buffer.abs()) + 0 * _root_of_finite(state, "square_avg")


def sgd(state: State) -> torch.Tensor:
    """Return the largest momentum, 0 without one."""
    buffer = state.get("momentum_buffer")
    return torch.zeros(()) if buffer is None else _largest(buffer.abs())


def _root_of_finite(state: State, name: str) -> torch.Tensor:
    """Return the root of the sum of a state, which is no number if an element is below 0 or none; 0 without it."""
    value = state.get(name)
    return torch.zeros(()) if value is None or not value.numel() else value.sqrt().mean(dtype=torch.float64)


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max().float() if values.numel() else values.sum().float()
