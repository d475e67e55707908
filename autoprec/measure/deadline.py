"""A deadline inside a training step, so that a trial need not finish a step that is a hundred times too slow."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autoprec.runtime.calls import describe


class StepTooSlow(Exception):  # noqa: N818  the outcome of a trial, not a failure of the tool
    """A step ran past its deadline. Caught by whoever set the deadline: no user meets it."""

    def __init__(self, limit_s: float, elapsed_s: float) -> None:
        super().__init__(f"step ran {elapsed_s:.3g} s, {limit_s:.3g} s were allowed")
        self.limit_s = limit_s
        self.elapsed_s = elapsed_s


@contextmanager
def step_deadline(seconds: float) -> Iterator[None]:
    """Raise `StepTooSlow` from the code of this block once it has run for `seconds`.

    Checked before and after every op that computes and, in the backward pass, whenever a saved tensor is read. A single
    op is never interrupted, so a step overruns by at most one op. On a GPU ops are queued: the clock is the host's.
    Inside `torch.utils.checkpoint`, which hooks saved tensors itself, the backward pass is not checked.
    Costs microseconds an op: for a first step, not for one that is timed. A step that raised leaves gradients behind,
    and perhaps some updates: drop the run.
    """
    started = time.perf_counter()
    inside = threading.Event()  # unlike a local, seen by the threads that run a GPU's backward pass
    inside.set()

    def check() -> None:
        elapsed = time.perf_counter() - started
        if elapsed > seconds and inside.is_set():
            raise StepTooSlow(seconds, elapsed)

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        check()
        return saved

    try:
        with _CheckedOps(check), saved_tensors_hooks(torch.Tensor.detach, unpack):
            yield
    finally:
        inside.clear()


class _CheckedOps(TorchFunctionMode):
    """Calls `check` before and after every op that computes.

    Other torch functions may be the end of somebody's `with` block, such as the one that switches autograd on again
    after `no_grad`: an exception in their place would leave torch in that state for good.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not describe(func).op.is_site:
            return func(*args, **(kwargs or {}))
        self._check()
        result = func(*args, **(kwargs or {}))
        self._check()
        return result
