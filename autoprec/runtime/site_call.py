"""One call of a site as it was seen: dtypes, kernels, and why a policy may not cast it."""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch

from autoprec.graph.site import Site
from autoprec.runtime.calls import Call
from autoprec.runtime.kernels import Kernel, floats_in
from autoprec.runtime.plans import CASTABLE, agrees
from autoprec.runtime.site_mode import Frame

Phase: TypeAlias = Literal["forward", "backward"]


class SiteCall:
    """One call of a site: what it was given, how its function was entered, and the kernels that ran for it.

    `given` and `entered` are the dtypes of the floating arguments before and after the casts; `entered` is None where
    something else ran in place of the function. `casts_inside` says that torch cast inside the function;
    `names_dtype` that the call has a `dtype=` of its own; `exemption` why a policy does not cast this call, and
    `is_left_alone` that it must not even be touched; `agrees` that mixed dtypes are made to agree.
    """

    def __init__(self, site: Site, call: Call, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.site, self.op, self.func = site, call.op, func
        self.agrees = agrees(call)
        floats = list(floats_in((*args, *kwargs.values())))
        self.given = tuple(tensor.dtype for tensor in floats)
        self.entered: tuple[torch.dtype, ...] | None = None
        self.names_dtype = isinstance(kwargs.get("dtype"), torch.dtype) or any(
            isinstance(value, torch.dtype) for value in args
        )
        self.exemption = ""
        self.is_left_alone = False
        self.is_autocast = bool(floats) and _is_autocast(floats[0].device.type)
        self.is_emulated = False
        self.casts_inside = False
        self.is_inside = False
        self.forward: list[Kernel] = []
        self.backward: list[Kernel] = []

    def note(self, kernel: Kernel, phase: Phase) -> None:
        """Remember a kernel that computed."""
        (self.forward if phase == "forward" else self.backward).append(kernel)


def exemption_of(call: Call, frame: Frame, args: Any, kwargs: Mapping[str, Any]) -> tuple[str, bool]:
    """Return why the stated semantics keep a policy from casting this call, and whether it must stay untouched."""
    others = [t.dtype for t in floats_in((*args, *kwargs.values())) if t.dtype not in CASTABLE]
    if frame.leaves_alone():
        return f"left alone: {_alone()}", True
    if kwargs.get("max_norm") is not None:
        return "left alone: the embedding renormalizes its weight in place", True
    if kwargs.get("sparse"):
        return "left alone: no cast passes on the sparse gradient of this embedding", True
    if others:
        return f"left alone: an argument is {str(others[0]).removeprefix('torch.')}", True
    if call.writes:
        return "left alone: its op is declared to write to an argument", True
    if kwargs.get("out") is not None:
        return "writes to out=, and computes in the dtype of that", False
    if _writes(call, kwargs):
        return "writes to its first argument, and computes in the dtype of that", False
    return "", False


def _writes(call: Call, kwargs: Mapping[str, Any]) -> bool:
    return call.writes_first or kwargs.get("inplace") is True


def _alone() -> str:
    """Return who switched autograd off: a custom autograd Function is found on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__:
            return "inside a custom autograd Function"
        frame = frame.f_back
    return "no_grad code in a module that trains"


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
