"""`Precision`: a policy installed in a module, and the way back."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.policy import Policy
from autoprec.runtime import checkpoint
from autoprec.runtime.cast_mode import PROMOTE, Action, CastMode
from autoprec.runtime.checkpointing import keep_frames
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.forwards import replace_forward, restore_forward
from autoprec.runtime.loss_scale import BoundedGradScaler
from autoprec.runtime.matmul_precision import MatmulState, claim_float32_matmul, release
from autoprec.runtime.optimizer_state import with_state_of
from autoprec.runtime.outputs import cast_floats
from autoprec.runtime.site_mode import Frame
from autoprec.runtime.storage import ParameterStorage

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
        self.scaler = BoundedGradScaler(device, policy.loss_scale)
        self.storage = ParameterStorage(policy.parameters)
        self._matmul_claim: MatmulState | None = None
        self._wrapped: tuple[nn.Module, ...] = ()
        self._actions: dict[tuple[str, str, int], Action] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Precision":
        twin = memo[id(self)] = Precision(self.model, self.policy, self.device)
        twin.model = copy.deepcopy(self.model, memo)
        twin.storage = self.storage.copied(twin.model, memo)
        return twin

    def __reduce__(self) -> Any:
        raise ApplyError(
            f'pickling a model that runs policy "{self.policy.name}": a policy is installed, not saved; '
            "save model.state_dict(), or call remove() on the Precision first, and apply() after loading"
        )

    @property
    def casts(self) -> bool:
        """Return whether any site can be cast: False for a policy of fp32 alone, which installs nothing."""
        return not {"fp32", "as_given"}.issuperset(self.policy.formats) or self.policy.parameters.storage != "fp32"

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
        self.storage.lower(self.model)
        keep_frames(_checkpointed_in_frame)
        for path, module in self.model.named_modules():
            replace_forward(module, _forward_of(self, path, module))
        self._wrapped = tuple(self.model.modules())

    def remove(self) -> None:
        """Restore the model: its forwards, the dtype of its parameters, torch's matmul precision. Idempotent."""
        if self.model.__dict__.get(APPLIED) is not self:
            return
        del self.model.__dict__[APPLIED]
        for module in (*self.model.modules(), *self._wrapped):  # some may have been exchanged since
            restore_forward(module)
        self.storage.restore()
        if self._matmul_claim is not None:
            release(self._matmul_claim)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer`, or its counterpart with state in the policy's format; call it before the first step.

        Raises: `ApplyError` for an optimizer, or an option of it, that has no counterpart in `torchao.optim`.
        """
        return with_state_of(self.policy, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside model and optimizer: FP32 masters, loss scale, random states."""
        return checkpoint.save(self.policy, self.scaler, self.storage)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, before or after model and optimizer loaded theirs; masters are taken exactly.

        Raises: `ApplyError` if `state` is that of another policy or model.
        """
        checkpoint.load(state, self.policy, self.scaler, self.storage)

    @contextmanager
    def frame(self, module: str, counts: Mapping[str, int] | None = None) -> Iterator[Frame]:
        """Make `module` own the sites of this block; the outermost frame of a thread switches casting on."""
        outer = _innermost()
        if outer is not None and outer.owner is self:
            with outer.frame(module, counts) as frame:
                yield frame
            return
        mode = _OwnedMode(self)
        _thread.mode = mode
        try:
            with mode, mode.frame(module, counts) as frame:
                yield frame
        finally:
            _thread.mode = outer

    def action_of(self, module: str, op: str, index: int) -> Action:
        """Return what the policy does at a site."""
        key = (module, op, index)
        if key not in self._actions:
            self._actions[key] = _action(self.policy.format_of(Site(*key))[0])
        return self._actions[key]


_thread = threading.local()


def _innermost() -> "_OwnedMode | None":
    """Return the mode whose model or loss code runs in this thread; a model inside another's may have its own."""
    mode: _OwnedMode | None = getattr(_thread, "mode", None)
    return mode


class _OwnedMode(CastMode):
    """The cast mode of one `Precision`. It stands aside where another one's model runs inside, and in backward passes.

    Activation checkpointing runs forwards again in there; each of them is then the outermost one and casts by itself.
    """

    def __init__(self, owner: Precision) -> None:
        super().__init__(owner.action_of)
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _innermost() is not self:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def on_other(self, func: Any, call: Any, args: Any, kwargs: Any) -> Any:
        if call.op.family != "autograd":
            return super().on_other(func, call, args, kwargs)
        self.forget_weights()
        _thread.mode = None
        try:
            return func(*args, **kwargs)
        finally:
            _thread.mode = self


def _checkpointed_in_frame() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return how to make a function run in the current frame, now and again later; None where nothing is cast."""
    mode = _innermost()
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


def _action(format_name: str) -> Action:
    if format_name == "as_given":
        return None
    return PROMOTE if format_name == "promote" else torch_dtype(format_name)


def _forward_of(precision: Precision, path: str, module: nn.Module) -> Callable[..., Any]:
    """Return what runs in place of a module's forward: the same code in a frame of its own."""
    returns_fp32 = path == "" and precision.policy.outputs == "fp32"
    agrees = isinstance(module, nn.RNNBase)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mode = _innermost()
        if not agrees and not returns_fp32 and mode is not None and mode.owner is precision:  # the usual case, in short
            mode.enter(path)
            try:
                return original(*args, **kwargs)
            finally:
                mode.leave()
        with precision.frame(path):
            if agrees:  # nn.LSTM and its kin compare the input's dtype with the stored weights' before any op runs
                args, kwargs = cast_floats((args, kwargs), next(module.parameters()).dtype)
            result = original(*args, **kwargs)
        return cast_floats(result, torch.float32) if returns_fp32 else result

    return around
