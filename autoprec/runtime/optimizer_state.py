"""Optimizer state in bf16 or 8 bit, on `torchao.optim`."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from autoprec.errors import ApplyError, a_or_an
from autoprec.policy import Policy
from autoprec.runtime.load_torchao import load_torchao
from autoprec.runtime.optimizer_step import LOW_STATE

_COUNTERPARTS: Mapping[type[Optimizer], str] = MappingProxyType({Adam: "Adam8bit", AdamW: "AdamW8bit"})
# What torchao's optimizers know, what only says how torch computes the same numbers, and what would change them.
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_IMPLEMENTATION = frozenset({"foreach", "fused", "decoupled_weight_decay"})
_UNKNOWN = ("maximize", "capturable", "differentiable")


def with_state_of(policy: Policy, optimizer: Optimizer) -> Optimizer:
    """Return `optimizer` for fp32 state, else torchao's counterpart for the same groups and hyperparameters.

    8 bit: torchao's `Adam8bit` and `AdamW8bit`; parameters of fewer than 4096 elements, or of a number that is no
    multiple of 256, keep FP32 state. bf16: the same optimizers, with bf16 moments for every parameter; each step
    computes in FP32 and rounds the moments to nearest. torchao holds the learning rate in a tensor: set it through a
    scheduler or `fill_`. `foreach` and `fused` choose among torch's kernels and are dropped.

    Raises: `ApplyError` for an optimizer without a counterpart, in use already, or with an option torchao lacks; and
    without torchao.
    """
    wanted = policy.parameters.optimizer_state
    if not isinstance(optimizer, Optimizer):
        raise ApplyError(f"precision.optimizer: got {a_or_an(optimizer)}; give it a torch.optim.Optimizer")
    if wanted == "fp32":
        return optimizer
    _check(optimizer, wanted)
    kind = getattr(load_torchao("torchao.optim", f"optimizer state in {wanted}"), _COUNTERPARTS[type(optimizer)])
    groups = [
        {key: value for key, value in group.items() if key not in (*_IMPLEMENTATION, *_UNKNOWN)}
        for group in optimizer.param_groups
    ]
    made: Optimizer = (kind if wanted == "8bit" else _bf16_of(kind))(groups)
    return made


def check_state_format(policy: Policy, optimizers: Iterable[Optimizer]) -> None:
    """Refuse to step an optimizer with FP32 state where the policy promises less.

    Raises: `ApplyError` for one that `with_state_of` would have exchanged.
    """
    wanted = policy.parameters.optimizer_state
    for optimizer in optimizers if wanted != "fp32" else ():
        if type(optimizer) in _COUNTERPARTS:
            raise ApplyError(
                f'precision.step: policy "{policy.name}" holds optimizer state in {wanted}, and this '
                f"{type(optimizer).__name__} holds it in FP32; write optimizer = precision.optimizer(optimizer) right "
                "after it is built"
            )


def _bf16_of(kind: Any) -> Any:
    """Return torchao's optimizer `kind` with bf16 moments, through the hook it has for other kinds of state."""

    class Bf16State(kind):  # type: ignore[misc]
        """Holds both moments in bf16; the step of `base` computes in FP32 and copies the moments back."""

        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:  # noqa: ARG002, FBT001 torchao's signature
            return torch.zeros_like(p, dtype=torch.bfloat16)

        def __setstate__(self, state: dict[str, Any]) -> None:
            """Load a checkpoint: torch has cast the moments to the dtype of the parameter, which loses nothing."""
            super().__setstate__(state)
            for moments in self.state.values():
                for name, value in moments.items():
                    if name != "step":
                        moments[name] = value.to(torch.bfloat16)

    setattr(Bf16State, LOW_STATE, True)
    Bf16State.__name__ = Bf16State.__qualname__ = kind.__name__.replace("8bit", "Bf16State")
    return Bf16State


def _check(optimizer: Optimizer, wanted: str) -> None:
    """Refuse an optimizer that torchao's counterpart would not continue exactly, but for the format of its state."""
    possible = " and ".join(f"torch.optim.{kind.__name__}" for kind in _COUNTERPARTS)
    if type(optimizer) not in _COUNTERPARTS:
        raise ApplyError(
            f"precision.optimizer: {type(optimizer).__name__} has no counterpart with {wanted} state in torchao.optim; "
            f"possible: {possible}; or write optimizer_state: fp32"
        )
    if optimizer.state:
        raise ApplyError(
            "precision.optimizer: this optimizer has taken steps, and its state would be lost; call it right after the "
            "optimizer is built, and load a checkpoint into what it returns"
        )
    for group in optimizer.param_groups:
        _check_group(group, wanted)


def _check_group(group: Mapping[str, Any], wanted: str) -> None:
    found = next((option for option in _UNKNOWN if group.get(option)), None)
    if found is not None:
        raise ApplyError(
            f"precision.optimizer: {found}=True is not possible with {wanted} state: torchao's optimizers have no such "
            f"option; they have {', '.join(_HYPERPARAMETERS)}; leave {found} out, or write optimizer_state: fp32"
        )
    if "initial_lr" in group:
        raise ApplyError(
            "precision.optimizer: a learning rate scheduler holds this optimizer already; build the scheduler for the "
            "optimizer that precision.optimizer() returns"
        )
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ApplyError(
                f"precision.optimizer: a parameter of {parameter.dtype} is not possible with {wanted} state: torchao's "
                "optimizers compute in FP32; write optimizer_state: fp32"
            )
