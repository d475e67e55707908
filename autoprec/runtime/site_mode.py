"""A torch function mode that knows to which site each call belongs.

The site is the module whose `forward` runs, the op, and how often that op ran before in this very `forward`.
Recording (`capture`) and casting (`runtime.cast_mode`) derive from it and hence agree on every site.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import is_grad_enabled
from torch.overrides import TorchFunctionMode

from autoprec.graph.site import LOSS_MODULE
from autoprec.runtime.calls import BODIES, Call, describe


class Frame:
    """One running `forward`: its module path and how often each op ran in it; `plans` are the cast mode's.

    `in_function` says that torch.compile traces it inside of a custom autograd Function.
    """

    __slots__ = ("counts", "grad_enabled", "in_function", "module", "plans")

    def __init__(self, module: str, counts: Mapping[str, int] | None = None) -> None:
        self.module = module
        self.counts = dict(counts) if counts else {}
        self.grad_enabled = is_grad_enabled()
        self.plans: Any = None
        self.in_function = False

    def next_index(self, op: str) -> int:
        """Return the index of this call of `op` and count it."""
        index = self.counts.get(op, 0)
        self.counts[op] = index + 1
        return index

    def leaves_alone(self) -> bool:
        """Return whether the running code left autograd by itself: `no_grad` code and custom autograd Functions."""
        return self.grad_enabled and not is_grad_enabled()


class SiteMode(TorchFunctionMode):
    """Hands every call to `on_site` or `on_other`; entered composites are hidden, their inner calls are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = [Frame(LOSS_MODULE)]

    def enter(self, module: str, counts: Mapping[str, int] | None = None) -> Frame:
        """Make `module` own the calls made until `leave()`; `counts` are those of a frame that goes on here."""
        frame = Frame(module, counts)
        self.frames.append(frame)
        return frame

    def leave(self) -> None:
        """Give the calls back to the module that owned them before."""
        self.frames.pop()

    @contextmanager
    def frame(self, module: str, counts: Mapping[str, int] | None = None) -> Iterator[Frame]:
        """Make `module` own the calls made in this block."""
        frame = self.enter(module, counts)
        try:
            yield frame
        finally:
            self.leave()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = describe(func)
        if call.is_entered:
            with self:
                return BODIES[func](*args, **kwargs)
        if not call.is_site:
            return self.on_other(func, call, args, kwargs)
        frame = self.frames[-1]
        return self.on_site(func, call, frame, frame.next_index(call.op.name), args, kwargs)

    def on_site(self, func: Any, call: Call, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        """Run a call that computes: the `index`-th of its op in `frame`."""
        raise NotImplementedError

    def on_other(self, func: Any, call: Call, args: Any, kwargs: Any) -> Any:  # noqa: ARG002 for subclasses
        """Run a call that has no site: movement, queries, creation."""
        return func(*args, **kwargs)
