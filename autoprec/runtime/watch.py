"""Watching one step from below: which kernels each site ran, forward and backward.

Three observers see one step. The cast mode is exchanged for one that opens a window around each site; a torch function
mode under it sees with which dtypes the site's function was entered after the casts; a dispatch mode sees the aten ops
that really ran. The autograd nodes a site made carry a mark, so that their kernels find back to it in the backward.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.graph.site import Site
from autoprec.ops import canonical_name
from autoprec.runtime.calls import Call
from autoprec.runtime.checkpointing import keep_frames
from autoprec.runtime.forwards import is_replaced, made_for, original_forward, replace_forward, restore_forward
from autoprec.runtime.kernels import base_name, floats_in, kernel_of, kind_of
from autoprec.runtime.owned_mode import OwnedMode, checkpointed_in_frame
from autoprec.runtime.plans import BACKWARD
from autoprec.runtime.precision import Precision
from autoprec.runtime.running import RUNNING
from autoprec.runtime.site_call import Phase, SiteCall, exemption_of
from autoprec.runtime.site_mode import Frame, SiteMode

_MARK = "autoprec_site_call"
_SHORT_WAY = 8  # nodes: views and casts


class Probe(Protocol):
    """Looks at the values around each kernel; `call` is the site it ran for, if any."""

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], phase: Phase, call: SiteCall | None
    ) -> AbstractContextManager[Callable[[Any], None]]:
        """Return a context manager around the kernel; what it yields is told the result."""


class Watch:
    """What was seen of a step: `calls`, in the order in which sites were first entered.

    `before(func, args, kwargs)` is called ahead of every kernel, `probe` around it.
    """

    def __init__(
        self, precision: Precision, before: Callable[[Any, Any, Any], None], probe: Probe | None = None
    ) -> None:
        self.precision = precision
        self.calls: list[SiteCall] = []
        self._before = before
        self._probe = probe
        self._open: list[SiteCall] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs in this block."""
        model = self.precision.model
        with ExitStack() as stack:
            if not self.precision.casts:  # nothing is installed: frames are, for as long as this lasts
                keep_frames(checkpointed_in_frame)
                for path, module in model.named_modules():
                    if not is_replaced(module) and not isinstance(module, torch.jit.ScriptModule):
                        replace_forward(module, made_for(module, _in_frame(self.precision, path)))
                        stack.callback(restore_forward, module)
            self.precision.watched_mode = partial(_WatchedMode, self)
            stack.callback(setattr, self.precision, "watched_mode", None)
            stack.enter_context(_Entries(self))
            stack.enter_context(_Kernels(self))
            yield

    def around(self, run: Callable[[], Any], call: SiteCall) -> Any:
        """Run a site with its window open, and mark the autograd nodes that it made."""
        self.calls.append(call)
        self._open.append(call)
        start = torch._C._autograd._get_sequence_nr()
        try:
            with self._entries_seen():
                result = run()
        finally:
            self._open.pop()
        _mark(result, start, torch._C._autograd._get_sequence_nr(), call)
        return result

    def _entries_seen(self) -> AbstractContextManager[object]:
        """Return a context in which entries are seen: a backward pass runs forwards again with no mode on the stack."""
        is_there = any(isinstance(mode, _Entries) for mode in _get_current_function_mode_stack())
        return nullcontext() if is_there else _Entries(self)

    def entering(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> SiteCall | None:
        """Return the open site whose function is being entered, if it is that; note with which dtypes."""
        call = self._open[-1] if self._open else None
        if call is None or call.func is not func or call.entered is not None:
            return None
        call.entered = tuple(tensor.dtype for tensor in floats_in((*args, *kwargs.values())))
        return call

    def place(self) -> tuple[Phase, SiteCall | None]:
        """Return in which phase the next kernel runs, and for which site.

        A window is open in the forward, and where checkpointing runs a forward again.
        """
        if self._open:
            return "forward", self._open[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None or RUNNING.mode is not None:
            return "forward", None
        return "backward", node.metadata.get(_MARK)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel and note it."""
        phase, call = self.place()
        self._before(func, args, kwargs)
        if self._probe is None:
            result = func(*args, **kwargs)
        else:
            with self._probe(func, args, kwargs, phase, call) as done:
                result = func(*args, **kwargs)
                done(result)
        if call is not None:
            self._note(func, args, kwargs, result, phase, call)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, phase: Phase, call: SiteCall) -> None:
        kind = kind_of(func, args, result)
        if kind == "cast" and call.is_inside:
            call.casts_inside = True
        is_own = canonical_name(base_name(func)) == call.op.name
        if kind == "cast" or (kind == "move" and not is_own):
            return
        node: Any = torch._C._current_autograd_node()
        if phase == "backward" and node.name().startswith("ToCopyBackward"):
            return  # autograd adds up gradients under the node of whoever came last, and that was a cast
        if phase == "backward" and base_name(func) in ("add", "add_") and node.name() != "AddBackward0":
            return  # the same, and that was this site
        kernel = kernel_of(func, args, kwargs, result)
        if kernel.takes:
            call.note(kernel, phase)


class _Kernels(TorchDispatchMode):
    """Sees every aten op that runs."""

    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._watch.run(func, args, kwargs or {})


class _Entries(TorchFunctionMode):
    """Sees torch functions after the cast mode, which is entered later and hence asked earlier."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._watch.entering(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        call.is_inside = True
        try:
            return func(*args, **kwargs)
        finally:
            call.is_inside = False


class _WatchedMode(OwnedMode):
    """The cast mode of a watched precision, which sees every call; one that casts nothing gives it what it is given."""

    def __init__(self, watch: Watch, owner: Precision) -> None:
        super().__init__(owner)
        self.shortens = None
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.aside:
            return func(*args, **(kwargs or {}))
        return SiteMode.__torch_function__(self, func, types, args, kwargs)

    def on_site(self, func: Any, call: Call, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        site_call = SiteCall(Site(frame.module, call.op.name, index), call, func, args, kwargs)
        if not site_call.given:
            return self._run(func, call, frame, index, args, kwargs)
        site_call.is_emulated = self.is_emulated(call.op.name, index)
        site_call.exemption, site_call.is_left_alone = exemption_of(call, frame, args, kwargs)
        run = partial(self._run, func, call, frame, index, args, kwargs)
        return self._watch.around(run, site_call)

    def on_other(self, func: Any, call: Call, args: Any, kwargs: Any) -> Any:
        if not self.owner.casts and call.op.name not in BACKWARD:
            return func(*args, **kwargs)
        return super().on_other(func, call, args, kwargs)

    def _run(self, func: Any, call: Call, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        if not self.owner.casts:
            return func(*args, **kwargs)
        return super().on_site(func, call, frame, index, args, kwargs)


def site_ahead() -> SiteCall | None:
    """Return the site into whose nodes the autograd node that runs now sends its gradient, if the way there is short.

    What runs between two sites, such as the cast of a model's outputs, is found by the site it goes back into.
    """
    node: Any = torch._C._current_autograd_node()
    for _ in range(_SHORT_WAY):
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if len(parents) != 1:
            return None
        node = parents[0]
        call: SiteCall | None = node.metadata.get(_MARK)
        if call is not None:
            return call
    return None


def _mark(result: Any, start: int, end: int, call: SiteCall) -> None:
    """Mark the autograd nodes numbered from `start` to `end` that the result comes from."""
    pending: list[Any] = [tensor.grad_fn for tensor in floats_in((result,)) if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen or not start <= node._sequence_nr() < end:
            continue
        seen.add(node)
        node.metadata[_MARK] = call
        pending += [parent for parent, _ in node.next_functions if parent is not None]


def _in_frame(precision: Precision, path: str) -> Callable[..., Any]:
    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with precision.frame(path):
            return original_forward(module)(*args, **kwargs)

    return forward
