"""Optimizers step on FP32 numbers of parameters that are stored low, without being told.

A hook that torch calls before every `optimizer.step()` hands the step a stand-in for the optimizer: of the same class
and with the same attributes, but with FP32 parameters in its groups and its state. What the step did is copied back
when it ends. The optimizer itself never changes: a step that raises leaves nothing to undo, `zero_grad`, gradient
clipping and `GradScaler.unscale_` see the model's own parameters, and those stay the same tensors at the same address.
(Swapping `parameter.data` for the length of a step does not do: torch then forgets the hooks on the gradient
accumulator, and DistributedDataParallel stops averaging gradients.)
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoprec.runtime.stored import STORED, StoredParameter, give_gradient, stored, take_gradient

# An attribute of optimizers whose state is low on purpose.
LOW_STATE = "_autoprec_low_state"

_STEP = "_autoprec_step"
_HOOKED = "_autoprec_hooked"

_load_state_dict = Optimizer.load_state_dict


class _Step:
    """One step of an optimizer: which FP32 parameter stands for which low one.

    The stand-in refers to its step and not the other way round: FP32 copies that live for one step must not wait for
    the garbage collector.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.wide_of: dict[torch.Tensor, torch.Tensor] = {}
        self.records: list[tuple[nn.Parameter, nn.Parameter, StoredParameter]] = []
        for group in optimizer.param_groups:
            for low in group["params"]:
                record = stored(low)
                if record is not None:
                    wide = self.wide_of[low] = record.begin(low)
                    self.records.append((low, wide, record))
        self._before: dict[str, Any] = {}

    def make_stand_in(self) -> Optimizer:
        """Return what takes the optimizer's place in its step."""
        found = self.optimizer
        stand_in: Optimizer = object.__new__(type(found))
        lists = {id(group["params"]): [self.wide_of.get(p, p) for p in group["params"]] for group in found.param_groups}
        # L-BFGS keeps the list of its parameters under a name of its own as well.
        stand_in.__dict__.update({name: lists.get(id(value), value) for name, value in found.__dict__.items()})
        stand_in.param_groups = [{**group, "params": lists[id(group["params"])]} for group in found.param_groups]
        state = ((self.wide_of.get(key, key), value) for key, value in found.state.items())
        stand_in.state = defaultdict(dict, state)
        self._before = dict(stand_in.__dict__)
        stand_in.__dict__[_STEP] = self
        return stand_in

    def publish(self) -> None:
        """Round the FP32 parameters into the stored ones."""
        for low, wide, record in self.records:
            record.publish(low, wide)

    def closure(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of L-BFGS and its kind: the model is evaluated where the step now is."""

        def evaluated() -> Any:
            self.publish()
            result = original()
            for low, wide, _ in self.records:
                take_gradient(wide, low)
            return result

        return evaluated

    def copy_back(self, stand_in: Optimizer) -> None:
        """Give the optimizer what became of its stand-in: state, hyperparameters, attributes."""
        low_of: dict[torch.Tensor, torch.Tensor] = {wide: low for low, wide in self.wide_of.items()}
        found = self.optimizer
        for group, theirs in zip(found.param_groups, stand_in.param_groups, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})
        state = {low_of.get(key, key): value for key, value in stand_in.state.items()}
        found.state.clear()
        found.state.update(state)
        for name, value in stand_in.__dict__.items():
            if name not in ("param_groups", "state", _STEP) and self._before.get(name, self) is not value:
                found.__dict__[name] = value

    def end(self, stand_in: Optimizer) -> None:
        """Do what follows a step that ended as it should."""
        self.publish()
        for low, wide, record in self.records:
            give_gradient(wide, low)
            record.end()
        self.copy_back(stand_in)


def activate(check: Callable[[Optimizer], None]) -> None:
    """Make every optimizer of this process step in FP32 on parameters that are stored low.

    `check`, a bound method, is asked once about every optimizer, and forgotten when its object is gone.
    """
    _checks.append(weakref.WeakMethod(check))
    _checked.clear()
    if not _active:
        _active.append(register_optimizer_step_pre_hook(_find_stored))
        Optimizer.load_state_dict = _loading_fp32  # type: ignore[assignment, method-assign]


def deactivate_if_unused() -> None:
    """Take the hooks out again once no parameter is stored low."""
    if _active and not len(STORED):
        _active.pop().remove()
        _checks.clear()
        if Optimizer.load_state_dict is _loading_fp32:
            Optimizer.load_state_dict = _load_state_dict  # type: ignore[method-assign]


_active: list[Any] = []
_checks: list[weakref.WeakMethod[Callable[[Optimizer], None]]] = []
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def has_hooks_of_others(optimizer: Optimizer) -> bool:
    """Return whether hooks that are not autoprec's run before or after each step of the optimizer."""
    hooks = [vars(optimizer).get(f"_optimizer_step_{when}_hooks") or {} for when in ("pre", "post")]
    return sum(map(len, hooks)) > len(vars(optimizer).get(_HOOKED, ()))


def _holds_stored(optimizer: Optimizer) -> bool:
    return any(stored(p) is not None for group in optimizer.param_groups for p in group["params"])


def _find_stored(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 torch's signature
    """Place our two hooks on an optimizer that needs them: last before its step, first after it.

    Between them and the step no other hook runs: hooks of others see the model's own parameters, not yet or already
    updated.
    """
    if optimizer not in _checked and not hasattr(optimizer, _STEP):
        for check in [found for reference in _checks if (found := reference()) is not None]:
            check(optimizer)
        _checked.add(optimizer)
    if not _holds_stored(optimizer):
        return
    if _HOOKED not in optimizer.__dict__:
        _widen_state(optimizer)
        before = optimizer.register_step_pre_hook(_begin)
        after = optimizer.register_step_post_hook(_end)
        optimizer.__dict__[_HOOKED] = (before, after)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
    optimizer._optimizer_step_pre_hooks.move_to_end(optimizer.__dict__[_HOOKED][0].id)  # type: ignore[attr-defined]


def _widen_state(optimizer: Optimizer) -> None:
    """Hold in FP32 what an optimizer made before its first step, in the dtype of the stored parameters (Adagrad)."""
    if hasattr(optimizer, LOW_STATE):
        return
    for parameter, state in optimizer.state.items():
        if stored(parameter) is not None:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype == parameter.dtype:
                    state[name] = value.float()


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _STEP in args[0].__dict__ or not _holds_stored(optimizer):
        return None
    step = _Step(optimizer)
    args = tuple(step.closure(arg) if callable(arg) else arg for arg in args[1:])
    kwargs = {name: step.closure(arg) if callable(arg) else arg for name, arg in kwargs.items()}
    return (step.make_stand_in(), *args), kwargs


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:  # noqa: ARG001 torch's signature
    step = args[0].__dict__.get(_STEP)
    if step is not None and step.optimizer is optimizer:  # not for a base class's step inside the stand-in's
        step.end(args[0])


@functools.wraps(_load_state_dict)
def _loading_fp32(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load with FP32 parameters in sight: torch casts the state that it loads to the dtype of its parameter."""
    if not _holds_stored(optimizer):
        _load_state_dict(optimizer, state_dict)
        return
    step = _Step(optimizer)
    stand_in = step.make_stand_in()
    _load_state_dict(stand_in, state_dict)
    step.copy_back(stand_in)
    for _, _, record in step.records:
        record.end()
