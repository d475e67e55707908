"""`Precision`: a policy installed in a module, and the way back."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.ops import lookup
from autoprec.policy import Policy
from autoprec.runtime.actions import Actions
from autoprec.runtime.cast_mode import CastMode
from autoprec.runtime.checkpointing import keep_frames
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.forwards import original_forward, replace_forward, restore_forward
from autoprec.runtime.leaves import leaf_forward
from autoprec.runtime.loss_scale import BoundedGradScaler
from autoprec.runtime.matmul_precision import MatmulState, claim_float32_matmul, release
from autoprec.runtime.outputs import cast_floats
from autoprec.runtime.plans import Action, ModulePlans
from autoprec.runtime.running import RUNNING
from autoprec.runtime.site_mode import Frame
from autoprec.runtime.step import Scheduler, StepOutcome, take_step, warn_collapsed
from autoprec.runtime.weight_casts import WeightCasts, any_is_sharded

if TYPE_CHECKING:
    from autoprec.runtime.one_step import Loss
    from autoprec.runtime.overflow import Overflow
    from autoprec.runtime.trace import Trace

APPLIED = "_autoprec_precision"


class Precision:
    """A policy installed in a model. `scaler` scales the loss as the policy says; `remove()` takes all of it back.

    Use as a context manager to remove the policy at the end of a block. A deep copy of the model runs the policy
    too, under a `Precision` of its own.
    """

    def __init__(self, model: nn.Module, policy: Policy, device: str) -> None:
        self.model = model
        self.policy = policy
        self.device = device
        self.scaler = BoundedGradScaler(device, policy.loss_scale, self._parameters)
        self._told_collapse = False
        self._lowered: tuple[str, ...] = ()
        self._matmul_claim: MatmulState | None = None
        self._wrapped: tuple[nn.Module, ...] = ()
        self._plans: dict[str, ModulePlans] = {}
        self._kept_casts = WeightCasts()
        actions = Actions(policy, device)
        self.executors = actions.executors
        self._at = actions.at
        self._actions: dict[tuple[str, str, int], Action] = {}
        self.watched_mode: Callable[[Precision], OwnedMode] | None = None  # set while a step is traced

    def _parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Precision":
        twin = memo[id(self)] = Precision(self.model, self.policy, self.device)
        twin.model = copy.deepcopy(self.model, memo)
        twin._lowered = self._lowered
        return twin

    def __reduce__(self) -> Any:
        raise ApplyError(
            f'pickling a model that runs policy "{self.policy.name}": a policy is installed, not saved; '
            "save model.state_dict(), or call remove() on the Precision first, and apply() after loading"
        )

    @property
    def casts(self) -> bool:
        """Return whether any site can be cast: False for a policy of fp32 alone, which installs nothing."""
        formats = (rule.format for rule in self.policy.rules if rule.format != "promote")
        return not {"fp32", "as_given"}.issuperset(formats) or self.policy.parameters.storage != "fp32"

    @property
    def is_installed(self) -> bool:
        """Return whether the model runs this policy: False after `remove()`."""
        return self.model.__dict__.get(APPLIED) is self

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Run the backward pass of `loss` times the loss scale; `arguments` go to `Tensor.backward`."""
        scaled: torch.Tensor = self.scaler.scale(loss)
        scaled.backward(**arguments)

    def step(
        self,
        *optimizers: torch.optim.Optimizer,
        max_norm: float | None = None,
        scheduler: Scheduler | None = None,
    ) -> StepOutcome:
        """Unscale, clip to `max_norm` if given, step, update the scale, and advance `scheduler` if all stepped.

        Optimizers that share a backward pass step together. With or without loss scaling; see `runtime.step`.

        Raises: `ScalingError` if the gradients are not what one scaled backward pass after another left.
        """
        outcome = take_step(self.scaler, optimizers, max_norm=max_norm, scheduler=scheduler)
        if not self._told_collapse and outcome.is_known and outcome.collapsed:
            self._told_collapse = True
            warn_collapsed(outcome)
        return outcome

    def trace(self, batch: Any, loss: "Loss | None" = None) -> "Trace":
        """Return in which formats the kernels of every site really run, forward and backward; see `runtime.trace`."""
        from autoprec.runtime.trace import trace

        return trace(self, batch, loss)

    def find_overflow(self, batch: Any, loss: "Loss | None" = None) -> "Overflow | None":
        """Return where the first non-finite value comes from at the present loss scale; see `runtime.overflow`."""
        from autoprec.runtime.overflow import find_overflow

        return find_overflow(self, batch, loss)

    def loss(self) -> Any:
        """Return a context manager for the loss code, whose sites have the module `@loss`.

        It may hold the call of the model as well: `with precision.loss(): loss = criterion(model(x), y)`.
        """
        return self.frame(LOSS_MODULE) if self.casts else nullcontext()

    def install(self) -> None:
        """Do what the policy says to the model and to torch's matmul precision; `remove()` undoes it."""
        self.model.__dict__[APPLIED] = self
        self._matmul_claim = claim_float32_matmul(self.device, self.policy.float32_matmul)
        if not self.casts:
            return
        if self.policy.parameters.storage != "fp32":
            self._lowered = _store(self.model, torch.float32, torch_dtype(self.policy.parameters.storage))
        keep_frames(checkpointed_in_frame)
        self.plans_of(LOSS_MODULE)
        for path, module in self.model.named_modules():
            self.plans_of(path)  # now, since torch.compile would have to trace it
            replace_forward(module, _forward_of(self, path, module))
        self._wrapped = tuple(self.model.modules())

    def remove(self) -> None:
        """Restore the model: its forwards, the dtype of its parameters, torch's matmul precision. Idempotent."""
        if not self.is_installed:
            return
        del self.model.__dict__[APPLIED]
        self._kept_casts.clear()
        for module in (*self.model.modules(), *self._wrapped):  # some may have been exchanged since
            restore_forward(module)
        if self._lowered:
            _store(self.model, torch_dtype(self.policy.parameters.storage), torch.float32, self._lowered)
        if self._matmul_claim is not None:
            release(self._matmul_claim)

    @contextmanager
    def frame(self, module: str, counts: Mapping[str, int] | None = None) -> Iterator[Frame]:
        """Make `module` own the sites of this block; the outermost frame of a thread switches casting on."""
        outer = RUNNING.mode
        if outer is not None and outer.owner is self:
            with outer.frame(module, counts) as frame:
                yield frame
            return
        mode = (self.watched_mode or OwnedMode)(self)
        RUNNING.mode = mode
        if outer is not None:
            outer.aside = True
        try:
            with mode, mode.frame(module, counts) as frame:
                yield frame
        finally:
            RUNNING.mode = outer
            if outer is not None:
                outer.aside = False

    def kept_casts(self) -> WeightCasts | None:
        """Return the casts that live from forward to forward; None under FSDP2, which refills its weights unseen."""
        return None if any_is_sharded(self._wrapped) else self._kept_casts

    def plans_of(self, module: str) -> ModulePlans:
        """Return what the policy does at the sites of a module."""
        plans = self._plans.get(module)
        if plans is None:
            plans = self._plans[module] = ModulePlans(module, self.action_of, self.policy.depends_on_index)
        return plans

    def action_of(self, module: str, op: str, index: int) -> Action:
        """Return what the policy does at a site."""
        key = (module, op, index)
        if key not in self._actions:
            self._actions[key] = self._at(Site(*key))
        return self._actions[key]

    action_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _stand_aside() -> None:
    RUNNING.mode = None


if hasattr(os, "register_at_fork"):  # a forked data loader worker inherits the modes of the thread that started it
    os.register_at_fork(after_in_child=_stand_aside)


class OwnedMode(CastMode):
    """The cast mode of one `Precision`. It stands aside where another one's model runs inside, and in backward passes.

    Activation checkpointing runs forwards again in there; each of them is then the outermost one and casts by itself.
    """

    def __init__(self, owner: Precision) -> None:
        super().__init__(owner.plans_of, owner.executors)
        self.owner = owner
        self.shortens: Precision | None = (
            owner  # whose leaf modules may skip the mode: nobody's in one that must see all
        )
        self._kept: list[WeightCasts | None] = []

    def kept_casts(self) -> WeightCasts | None:
        """Return the owner's kept casts, asked for once a forward."""
        if not self._kept:
            self._kept.append(self.owner.kept_casts())
        return self._kept[0]

    def on_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward pass, in which this mode stands aside."""
        RUNNING.mode, self.aside = None, True
        try:
            return func(*args, **kwargs)
        finally:
            RUNNING.mode, self.aside = self, False


def checkpointed_in_frame() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return how to make a function run in the current frame, now and again later; None where nothing is cast."""
    mode = RUNNING.mode
    if mode is None:
        return None
    current, precision = mode.frames[-1], mode.owner
    module, counts = current.module, dict(current.counts)

    def entering(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with precision.frame(module, counts) as frame:
                result = function(*args, **kwargs)
            if mode.frames[-1] is current:  # the first time: what follows in this forward goes on counting
                current.counts.update(frame.counts)
            return result

        return run

    return entering


def _store(
    model: nn.Module, found: torch.dtype, wanted: torch.dtype, names: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Store parameters of dtype `found` (all, or those named) and their gradients in `wanted`; return their names."""
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.dtype == found and (names is None or name in names):
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(wanted)
            parameter.grad = None if grad is None else grad.to(wanted)
            changed.append(name)
    return tuple(changed)


def _forward_of(precision: Precision, path: str, module: nn.Module) -> Callable[..., Any]:
    """Return what runs in place of a module's forward: the same code in a frame of its own, or a leaf's in short."""
    returns_fp32 = path == "" and precision.policy.outputs == "fp32"
    agrees = isinstance(module, nn.RNNBase)

    def in_frame(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        mode = RUNNING.mode
        if not agrees and not returns_fp32 and mode is not None and mode.owner is precision:  # the usual case, in short
            mode.enter(path)
            try:
                return original_forward(module)(*args, **kwargs)
            finally:
                mode.leave()
        with precision.frame(path):
            if agrees:  # nn.LSTM and its kin compare the input's dtype with the stored weights' before any op runs
                args, kwargs = cast_floats((args, kwargs), next(module.parameters()).dtype)
            result = original_forward(module)(*args, **kwargs)
        return cast_floats(result, torch.float32) if returns_fp32 else result

    def action_of(op: str) -> Action:
        return precision.action_of(path, op, 0) if lookup(op).is_site else None

    return (leaf_forward(module, precision, action_of, in_frame) if path else None) or in_frame
