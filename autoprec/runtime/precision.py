"""`Precision`: a policy installed in a module, and the way back."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.policy import Policy
from autoprec.runtime import checkpoint
from autoprec.runtime.actions import Actions
from autoprec.runtime.checkpointing import keep_frames
from autoprec.runtime.compilation import Compilation
from autoprec.runtime.compiled import name_in_graphs
from autoprec.runtime.custom_functions import leave_functions_alone
from autoprec.runtime.forwards import restore_forward
from autoprec.runtime.fused import check_fused, fuse
from autoprec.runtime.loss_scale import BoundedGradScaler
from autoprec.runtime.matmul_precision import claim_float32_matmul, release_with
from autoprec.runtime.memory_format import WeightLayout
from autoprec.runtime.optimizer_state import check_state_format, with_state_of
from autoprec.runtime.owned_mode import OpenFrame, OwnedMode, checkpointed_in_frame, install_forward
from autoprec.runtime.plans import Action, ModulePlans
from autoprec.runtime.refusals import Seal, refuse_symbolic_tracing
from autoprec.runtime.site_mode import Frame
from autoprec.runtime.step import Scheduler, StepOutcome, Undone, take_step, warn_collapsed
from autoprec.runtime.storage import ParameterStorage, is_in_ddp
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
        self.device = device
        self.name_in_graphs = name_in_graphs(self)
        self._told_collapse = False
        self._adopt(policy, BoundedGradScaler(device, policy.loss_scale, self._parameters))

    def _adopt(self, policy: Policy, scaler: BoundedGradScaler) -> None:
        """Become the handle of `policy`, not yet installed."""
        device = self.device
        self.policy = policy
        self.casts = _casts(policy)
        self.scaler = scaler
        self.layout = WeightLayout(policy.memory_format)
        self.compilation = Compilation(policy)
        self.storage = ParameterStorage(policy.parameters)
        self._release_matmul: Callable[[], object] = lambda: None
        self._wrapped: tuple[nn.Module, ...] = ()
        self._plans: dict[str, ModulePlans] = {}
        self.kept_casts = WeightCasts(self._parameters)
        self._is_sharded: bool | None = None
        actions = Actions(policy, device)
        self.executors = actions.executors
        self._at = actions.at
        self._actions: dict[tuple[str, str, int], Action] = {}
        # Others after an exchange: those that deep copies have from before serve no mode any more, and go the long way.
        self.short_forwards: dict[Any, Callable[..., Any]] = {}
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
        twin.layout = self.layout.copied(memo)
        twin.storage = self.storage.copied(twin.model, memo)
        twin.scaler.load_state_dict(self.scaler.state_dict())
        if self.is_installed:
            twin._claim_matmul()
            twin.compilation.compile(twin.model, self.device)
        return twin

    def __reduce__(self) -> Any:
        return Seal(self.policy.name).__reduce__()

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
        skip_non_finite: bool = False,
        loss: torch.Tensor | None = None,
        undo: Callable[[], Undone | None] | None = None,
    ) -> StepOutcome:
        """Unscale, clip to `max_norm` if given, step, update the scale, and advance `scheduler` if all stepped.

        Optimizers that share a backward pass step together. With or without loss scaling; see `runtime.step`. With
        `skip_non_finite` a step whose gradients, or whose `loss` if given, are not finite is skipped in either case;
        that waits for the device, but for fused optimizers. `undo` is called after the step, and may take it back.

        Raises: `ScalingError` if the gradients are not what one scaled backward pass after another left; `ApplyError`
        for an optimizer that `optimizer()` should have exchanged.
        """
        check_state_format(self.policy, optimizers)
        check_fused(self.policy, optimizers)
        outcome = take_step(
            self.scaler,
            optimizers,
            max_norm=max_norm,
            scheduler=scheduler,
            skip_non_finite=skip_non_finite,
            loss=loss,
            undo=undo,
        )
        if not skip_non_finite and not self._told_collapse and outcome.is_known and outcome.collapsed:
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
        return self.frame(LOSS_MODULE) if self.casts and self.is_installed else nullcontext()

    def install(self) -> None:
        """Do what the policy says to the model and to torch's matmul precision; `remove()` undoes it."""
        self.model.__dict__[APPLIED] = self
        self.layout.lay_out(self.model)
        if self.casts:
            self.storage.lower(self.model)
        self._put_in()

    def _put_in(self) -> None:
        """Install what the policy says about sites, matmuls and compilation."""
        self.model.__dict__[APPLIED] = self
        self._claim_matmul()
        if self.casts:
            self._install_casts()
        self.compilation.compile(self.model, self.device)

    def _install_casts(self) -> None:
        """Have the modules cast what enters their sites."""
        keep_frames(checkpointed_in_frame)
        leave_functions_alone()
        refuse_symbolic_tracing()
        self.plans_of(LOSS_MODULE)
        for path, module in self.model.named_modules():
            self.plans_of(path)  # now, since torch.compile would have to trace it
            install_forward(self, path, module)
        self._wrapped = tuple(self.model.modules())

    def remove(self) -> None:
        """Restore the model: its forwards, dtype and layout of its parameters, torch's matmul precision. Idempotent."""
        if self.is_installed:
            self._take_out()
            self.storage.restore()
            self.layout.restore()
            self.scaler.retire()

    def _take_out(self) -> None:
        """Take out what `_put_in` installed."""
        del self.model.__dict__[APPLIED]
        self.kept_casts.clear()
        for module in (*self.model.modules(), *self._wrapped):  # some may have been exchanged since
            restore_forward(module)
        self.compilation.restore()
        self._release_matmul()

    def exchange(self, policy: Policy) -> None:
        """Run `policy` from here on, under this very handle and between two steps.

        Masters, the random numbers of stochastic rounding and the parameters' identity stay, and with them every
        optimizer; so do the loss scale, within the bounds of `policy`, and `scaler` itself where those are equal.
        Code that torch.compile has made is forgotten, and made anew for the new policy.

        Raises: `ApplyError` if this policy is not installed (any more), or if parameters that
        DistributedDataParallel holds would be stored otherwise; whatever installing raises, and then the old policy
        runs on.
        """
        if not self.is_installed:
            raise ApplyError(f'exchange: policy "{self.policy.name}" is not installed any more; apply it again first')
        if not self.can_exchange(policy):
            raise ApplyError(
                f'exchange: "{policy.name}" stores parameters in another format than "{self.policy.name}", and '
                "DistributedDataParallel holds these; start anew from a checkpoint under the other policy"
            )
        previous, scaler = self.policy, self.scaler
        try:
            self._reinstall(policy, self._scaler_of(policy))
        except BaseException:
            self._reinstall(previous, scaler)
            raise
        if self.scaler is not scaler:
            scaler.retire()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()

    def can_exchange(self, policy: Policy) -> bool:
        """Return whether `exchange` can go on with `policy`: parameters that DDP holds keep their format."""
        return policy.parameters == self.policy.parameters or not is_in_ddp(self.model)

    def _scaler_of(self, policy: Policy) -> BoundedGradScaler:
        """Return the scaler that goes on under `policy`."""
        if policy.loss_scale == self.policy.loss_scale:
            return self.scaler
        scaler = BoundedGradScaler(self.device, policy.loss_scale, self._parameters)
        if scaler.is_enabled() and self.scaler.is_enabled():
            scaler.load_state_dict(self.scaler.state_dict())
        return scaler

    def _reinstall(self, policy: Policy, scaler: BoundedGradScaler) -> None:
        layout, storage, previous = self.layout, self.storage, self.policy
        if self.is_installed:
            self._take_out()
        self._adopt(policy, scaler)
        self.layout, self.storage = layout, storage
        if policy.parameters != previous.parameters or policy.memory_format != previous.memory_format:
            generators = storage.generators.state()
            storage.restore()
            layout.restore()
            self._adopt(policy, scaler)
            self.layout.lay_out(self.model)
            if self.casts:
                self.storage.lower(self.model)
            self.storage.generators.load(generators)
        self._put_in()

    def _claim_matmul(self) -> None:
        """Set the precision inside FP32 matmuls until this object is removed or, forgotten with its model, dies."""
        claim = claim_float32_matmul(self.device, self.policy.float32_matmul)
        self._release_matmul = release_with(self, claim)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer`, or its counterpart with state in the policy's format; call it before the first step.

        Under `optimizer: fused` it steps in torch's fused kernels from now on.

        Raises: `ApplyError` for an optimizer, or an option of it, that has no counterpart in `torchao.optim`, or no
        fused kernels.
        """
        return fuse(self.policy, with_state_of(self.policy, optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside model and optimizer: FP32 masters, loss scale, random states."""
        return checkpoint.save(self.policy, self.scaler, self.storage)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, before or after model and optimizer loaded theirs; masters are taken exactly.

        Raises: `ApplyError` if `state` is that of another policy or model.
        """
        checkpoint.load(state, self.policy, self.scaler, self.storage)

    def frame(self, module: str, counts: Mapping[str, int] | None = None) -> AbstractContextManager[Frame]:
        """Make `module` own the sites of a block; the outermost frame of a thread switches casting on."""
        return OpenFrame(self, module, counts)

    def is_sharded(self) -> bool:
        """Return whether FSDP2 manages parameters of the model, the root's or any from before the first forward."""
        if self._is_sharded is None:
            self._is_sharded = any_is_sharded(self._wrapped)
        return self._is_sharded or any_is_sharded((self.model,))

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


def _casts(policy: Policy) -> bool:
    """Return whether any site can be cast: False for a policy of fp32 alone, which replaces no forward."""
    formats = (rule.format for rule in policy.rules if rule.format != "promote")
    return not {"fp32", "as_given"}.issuperset(formats) or policy.parameters.storage != "fp32"
