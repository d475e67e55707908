"""The mode in which the model and the loss code of one `Precision` run: when it begins, and whose modules it serves."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from autoprec.ops import lookup
from autoprec.runtime.cast_mode import CastMode
from autoprec.runtime.compiled import traced_action
from autoprec.runtime.edits import tell, tell_no_more
from autoprec.runtime.forwards import LEAF, SEAL, made_for, original_forward, replace_forward, with_constants
from autoprec.runtime.leaves import Leaf, leaf_forward
from autoprec.runtime.outputs import cast_floats
from autoprec.runtime.plans import CASTABLE, Action
from autoprec.runtime.refusals import Seal, check_runs
from autoprec.runtime.running import RUNNING
from autoprec.runtime.site_mode import Frame

if TYPE_CHECKING:
    from autoprec.runtime.precision import Precision


def _stand_aside() -> None:
    if RUNNING.mode is not None:
        RUNNING.mode.aside = True
        RUNNING.mode = None


if hasattr(os, "register_at_fork"):  # a forked data loader worker inherits the modes of the thread that started it
    os.register_at_fork(after_in_child=_stand_aside)


class _Forgetful(dict[int, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: int, value: Any) -> None:
        pass


class OwnedMode(CastMode):
    """The cast mode of one `Precision`. It stands aside where another one's model runs inside, and in backward passes.

    Activation checkpointing runs forwards again in there; each of them is then the outermost one and casts by itself.
    """

    # Whose leaf modules may skip this mode, by their forwards; nobody's where it must see all.
    shortens: Mapping[Any, Callable[..., Any]] | None = None

    def __init__(self, owner: "Precision") -> None:
        super().__init__(owner.plans_of, owner.action_of, owner.executors)
        self.owner = owner
        self.outer: OwnedMode | None = None  # that of another model, which calls this one
        if is_dynamo_compiling():
            return  # a compiler traces leaf modules as they are, and keeps no casts
        self.shortens = owner.short_forwards
        if owner.is_sharded():  # FSDP2 refills its weights unseen, and a cast that is kept would undo the sharding
            self.casts = {dtype: _Forgetful() for dtype in CASTABLE}
        else:
            self.kept_casts = owner.kept_casts.of_forward()

    def action_at(self, module: str, op: str, index: int) -> Action:
        """Return what the policy does at a site."""
        if is_dynamo_compiling():
            return traced_action(self.owner.name_in_graphs, module, op, index)
        return super().action_at(module, op, index)

    def on_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward pass, in which this mode stands aside."""
        RUNNING.mode, self.aside = None, True
        try:
            return func(*args, **kwargs)
        finally:
            RUNNING.mode, self.aside = self, False


class OpenFrame:
    """A block whose sites belong to one module; the outermost one of a thread switches casting on.

    A class, and not a generator: a training loop of small steps enters one in each of them.
    """

    __slots__ = ("_counts", "_module", "_owner")

    def __init__(self, owner: "Precision", module: str, counts: Mapping[str, int] | None = None) -> None:
        self._owner, self._module, self._counts = owner, module, counts

    def __enter__(self) -> Frame:
        outer = RUNNING.mode
        if outer is not None and outer.owner is self._owner:
            return outer.enter(self._module, self._counts)
        mode = (self._owner.watched_mode or OwnedMode)(self._owner)
        mode.outer = outer
        mode.__enter__()  # type: ignore[no-untyped-call]
        if not is_dynamo_compiling():
            tell(mode)
        if outer is not None:
            outer.aside = True
        RUNNING.mode = mode
        return mode.enter(self._module, self._counts)

    def __exit__(self, *error: Any) -> None:
        mode = RUNNING.mode
        assert mode is not None
        mode.leave()
        if len(mode.frames) > 1:
            return
        RUNNING.mode = outer = mode.outer
        if outer is not None:
            outer.aside = False
        if not is_dynamo_compiling():
            tell_no_more(mode)
        mode.__exit__(*error)  # type: ignore[no-untyped-call]


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


def in_frame(precision: "Precision", path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a module's own forward in a frame of its own; the outermost one switches casting on."""
    mode = RUNNING.mode
    if mode is not None and mode.owner is precision:  # the usual case, in short
        mode.enter(path)
        try:
            return original_forward(module)(*args, **kwargs)
        finally:
            mode.leave()
    with precision.frame(path):
        if mode is None and not is_dynamo_compiling():
            check_runs(precision)
        return original_forward(module)(*args, **kwargs)


def install_forward(precision: "Precision", path: str, module: nn.Module) -> None:
    """Have a module run its forward in a frame of its own; a leaf that only casts its input does it in short."""
    returns_fp32 = path == "" and precision.policy.outputs == "fp32"
    agrees = isinstance(module, nn.RNNBase)

    def framed(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return in_frame(precision, "@path", module, args, kwargs)

    def converting(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with precision.frame("@path"):
            if not is_dynamo_compiling():
                check_runs(precision)
            if agrees:  # nn.LSTM and its kin compare the input's dtype with the stored weights' before any op runs
                args, kwargs = cast_floats((args, kwargs), next(module.parameters()).dtype)
            result = original_forward(module)(*args, **kwargs)
        return cast_floats(result, torch.float32) if returns_fp32 else result

    def action_of(op: str) -> Action:
        return precision.action_of(path, op, 0) if lookup(op).is_site else None

    whole = made_for(module, with_constants(converting if agrees or returns_fp32 else framed, {"@path": path}))
    short = leaf_forward(module, precision, action_of) if path else None
    if short is not None:
        module.__dict__[LEAF] = Leaf(precision, path, type(module).forward, whole)
    module.__dict__[SEAL] = Seal(precision.policy.name)
    replace_forward(module, short or whole)
