"""What each format would hold of parameters, gradients, optimizer state and buffers, from one optimizer step.

Every statement is about storing in the format without FP32 master copies.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.numerics import format_named, round_scalar
from autoprec.runtime.dtypes import torch_dtype
from autoprec.workload.parts import build_optimizer

# A parameter of which this fraction stays where it is does not learn.
FROZEN_FRAC = 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredParameter:
    """One parameter: its size, the elements of optimizer state that go with it, and what rounding does to its step.

    `lost_update_frac` says for each format which fraction of the elements that the step moved would not have moved;
    empty if no step was taken.
    """

    name: str
    shape: tuple[int, ...]
    num_elements: int
    num_state_elements: int
    lost_update_frac: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBuffer:
    """One floating-point buffer; `momentum` is set for running statistics that a module updates with it."""

    name: str
    shape: tuple[int, ...]
    num_elements: int
    momentum: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """What a training run stores.

    `measured` says whether an optimizer step was taken: if not (the optimizer wants a closure), state and updates are
    unknown. `lr`, `eps` and `second_moment_decay` (Adam's beta2) are the optimizer's, None where it has none.
    """

    optimizer: str
    measured: bool
    lr: float | None
    eps: float | None
    second_moment_decay: float | None
    parameters: tuple[StoredParameter, ...]
    buffers: tuple[StoredBuffer, ...]

    def num_bytes(self, part: str, format_name: str) -> int:
        """Return the size of `parameters`, `gradients`, `optimizer_state` or `buffers` if stored in a format."""
        counts = {
            "parameters": (each.num_elements for each in self.parameters),
            "gradients": (each.num_elements for each in self.parameters),
            "optimizer_state": (each.num_state_elements for each in self.parameters),
            "buffers": (each.num_elements for each in self.buffers),
        }
        return sum(counts[part]) * format_named(format_name).storage_bits // 8


STORED_PARTS = ("parameters", "gradients", "optimizer_state", "buffers")


def storage_of(
    model: nn.Module, make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], formats: Sequence[str]
) -> Storage:
    """Return what a run of `model` stores. The model must hold the gradients of a step; it is left as it was.

    One optimizer step is taken on it and undone. Needs one more copy of the parameters while it runs.
    """
    optimizer = build_optimizer(make_optimizer, model)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    before = [parameter.detach().clone() for _, parameter in named]
    measured = _step(optimizer)
    parameters = tuple(
        StoredParameter(
            name=name,
            shape=tuple(parameter.shape),
            num_elements=parameter.numel(),
            num_state_elements=_num_state_elements(optimizer, parameter),
            lost_update_frac=_lost_update_fracs(old, parameter.detach(), formats) if measured else {},
        )
        for (name, parameter), old in zip(named, before, strict=True)
    )
    with torch.no_grad():
        for (_, parameter), old in zip(named, before, strict=True):
            parameter.copy_(old)
    betas = _of_groups(optimizer, "betas")
    return Storage(
        optimizer=type(optimizer).__name__,
        measured=measured,
        lr=_number(_of_groups(optimizer, "lr")),
        eps=_number(_of_groups(optimizer, "eps")),
        second_moment_decay=_number(betas[1]) if isinstance(betas, tuple) and len(betas) > 1 else None,
        parameters=parameters,
        buffers=tuple(_buffers(model)),
    )


def frozen_parameters(storage: Storage, format_name: str) -> tuple[str, ...]:
    """Return the names of the parameters that practically did not move in the step if stored in the format."""
    return tuple(each.name for each in storage.parameters if each.lost_update_frac.get(format_name, 0) >= FROZEN_FRAC)


def stalled_statistics(storage: Storage, format_name: str) -> tuple[str, ...]:
    """Return the running statistics that an update as large as themselves no longer moves, stored in the format.

    Half the spacing at a value is between `unit_roundoff` / 2 and `unit_roundoff` times it, and momentum is below that:
    the statistic stalls on its way up to a power of two, or everywhere if momentum is below the lower one too.
    """
    low = format_named(format_name)
    return tuple(
        each.name for each in storage.buffers if each.momentum is not None and each.momentum < low.unit_roundoff
    )


def second_moment_freezes(storage: Storage, format_name: str) -> bool:
    """Return whether a second moment stored in the format never decays: v * beta2 rounds back to every v.

    Half the spacing at v is at least v * `unit_roundoff` / 2, and v * (1 - beta2) is less.
    """
    beta2 = storage.second_moment_decay
    return beta2 is not None and 1 - beta2 < format_named(format_name).unit_roundoff / 2


def eps_vanishes(storage: Storage, format_name: str) -> bool:
    """Return whether the optimizer's eps is zero in the format."""
    return bool(storage.eps) and round_scalar(storage.eps or 0.0, format_named(format_name)) == 0


def _step(optimizer: torch.optim.Optimizer) -> bool:
    """Take a step and return whether that was possible; L-BFGS and its kind want a closure."""
    try:
        optimizer.step()
    except TypeError:
        return False
    return True


def _num_state_elements(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    state = optimizer.state.get(parameter, {})
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 0)


def _lost_update_fracs(old: torch.Tensor, new: torch.Tensor, formats: Sequence[str]) -> dict[str, float]:
    return {name: _lost_update_frac(old, new, torch_dtype(name)) for name in formats}


def _lost_update_frac(old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the fraction of moved elements that `dtype` does not move: rounded old + step rounds to rounded old."""
    update = new - old
    num_moved = int(update.count_nonzero())
    if num_moved == 0:
        return 0.0
    stored = old.to(dtype)
    stays = (stored.to(old.dtype) + update).to(dtype).to(old.dtype) == stored.to(old.dtype)
    return int((stays & (update != 0)).sum()) / num_moved


def _of_groups(optimizer: torch.optim.Optimizer, key: str) -> Any:
    """Return the first parameter group's value for `key`."""
    return optimizer.param_groups[0].get(key)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _buffers(model: nn.Module) -> Iterator[StoredBuffer]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                momentum = getattr(module, "momentum", None) if name.startswith("running_") else None
                yield StoredBuffer(
                    name=f"{path}.{name}" if path else name,
                    shape=tuple(buffer.shape),
                    num_elements=buffer.numel(),
                    momentum=_number(momentum),
                )
