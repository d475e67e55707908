"""The cast mode: a programmable autocast. Casts the arguments of each site to the format its policy names."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from autoprec.graph.site import LOSS_MODULE
from autoprec.runtime.arguments import are_flags, tensors_in, widest, writes_first
from autoprec.runtime.calls import BODIES, Call
from autoprec.runtime.compiled import ASKS, allow_effects, end_effects, not_compiled_alone, run_graph_aside, traced_as
from autoprec.runtime.norms import call_norm
from autoprec.runtime.plans import (
    ALIKE,
    ALIKE_IN_FP32,
    BACKWARD,
    CASTABLE,
    NORMS_THAT_NAME,
    PROMOTE,
    Action,
    Executor,
    ModulePlans,
    agrees,
    needs_fp32,
)
from autoprec.runtime.site_mode import Frame, SiteMode
from autoprec.runtime.traced_functions import in_backward_of_function, in_function
from autoprec.runtime.weight_casts import SMALLEST, WeightCasts, to_dtype

# A cast of this forward: the weight (an `id` outlives what it points at), its version, its cast.
_Cast = tuple[Tensor, int, Tensor]


class CastMode(SiteMode):
    """Casts floating tensor arguments at each site as the plans of the running module say.

    Never cast: integer and complex tensors, an argument that is written to, norm parameters and running
    statistics, calls that compute in float64 (the author's explicit choice), calls under `no_grad` inside a module
    that needs gradients, and calls with `out=`. While it is `aside`, nothing is.
    """

    def __init__(
        self,
        plans_of: Callable[[str], ModulePlans],
        action_of: Callable[[str, str, int], Action],
        executors: Mapping[str, Executor],
    ) -> None:
        self._plans_of = plans_of
        self._action_of = action_of
        self._executors = executors
        self.aside = False
        self.kept_casts: WeightCasts | None = None
        self.casts: Mapping[torch.dtype, dict[int, _Cast]] = {dtype: {} for dtype in CASTABLE}
        super().__init__()

    def enter(self, module: str, counts: Mapping[str, int] | None = None) -> Frame:
        """Make `module` own the calls made until `leave()`; `counts` are those of a frame that goes on here."""
        frame = Frame(module, counts)
        if not is_dynamo_compiling():
            self.frames.append(frame)
            return frame
        allow_effects()
        frame.in_function = in_function()
        self.frames.append(frame)
        end_effects()
        return frame

    def leave(self) -> None:
        """Give the calls back to the module that owned them before."""
        if is_dynamo_compiling():  # no cast is kept, and asking for them would guard on each
            allow_effects()
            super().leave()
            end_effects()
            return
        super().leave()
        if self.frames[-1].module == LOSS_MODULE:
            self.forget_weights()

    def forget_weights(self) -> None:
        """Look at every weight anew from here on: an optimizer may have stepped."""
        for casts in self.casts.values():
            casts.clear()

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Look at these weights anew from here on: somebody has edited them, or may do so."""
        for weight in weights:
            for casts in self.casts.values():
                casts.pop(id(weight), None)

    def stepped(self, optimizer: Optimizer, weights: Iterable[Tensor]) -> None:  # noqa: ARG002
        """Look at the weights of an optimizer anew from here on: it steps inside the forward."""
        self.forget(weights)

    def _traced(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what `__torch_function__` does where torch.compile traces it: it would guard on plans."""
        if self.aside:
            return func(*args, **(kwargs or {}))
        run_graph_aside()
        if in_backward_of_function():
            return func(*args, **(kwargs or {}))
        if func is checkpoint:  # eager checkpointing is no call that a mode sees
            return self._checkpointed(func, *args, **(kwargs or {}))
        allow_effects()
        try:
            return SiteMode.__torch_function__(self, func, types, args, kwargs)
        finally:
            end_effects()

    @traced_as(_traced)
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ASKS and is_dynamo_compiling():
            return self._traced(func, types, args, kwargs)
        if self.aside:
            return func(*args, **(kwargs or {}))
        frame = self.frames[-1]
        plans: ModulePlans = frame.plans or self._planned(frame)
        if func in plans.idle:
            return func(*args, **kwargs) if kwargs else func(*args)
        plan = plans.plans.get(func) or plans.plan(func)
        kwargs, call = kwargs or {}, plan.call
        if call.is_entered:
            with self:
                return BODIES[func](*args, **kwargs)
        if not call.is_site:
            return self.on_other(func, call, args, kwargs)
        index = frame.next_index(call.op.name)
        if plan.dtype is not None and not frame.leaves_alone() and (not kwargs or are_flags(kwargs)):
            return self._call_plain(func, plan.dtype, args, kwargs)
        return self.on_site(func, call, frame, index, args, kwargs)

    def _checkpointed(self, func: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Have torch.compile checkpoint a function with the mode inside: it traces the function apart from the rest."""

        def run(*given: Any, **named: Any) -> Any:
            with self:
                return function(*given, **named)

        return func(run, *args, **kwargs)

    def _planned(self, frame: Frame) -> ModulePlans:
        """Give a frame its plans with its first call; under torch.compile, which would guard on them, it gets none."""
        plans = frame.plans = self._plans_of(frame.module)
        return plans

    def _call_plain(self, func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        """Run a call whose arguments are all cast to one dtype; no tensor is among `kwargs`."""
        cast = []
        for value in args:
            if isinstance(value, Tensor):
                found = value.dtype
                if found is dtype:
                    cast.append(value)
                    continue
                if found in CASTABLE:
                    cast.append(self.cast(value, dtype))
                    continue
                if found.is_floating_point:
                    return func(*args, **kwargs)  # float64: the author's explicit choice
            elif isinstance(value, (tuple, list)):
                return self._call_all(func, args, kwargs, dtype)
            cast.append(value)
        return func(*cast, **kwargs)

    def on_site(self, func: Any, call: Call, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        """Cast what the policy says to cast, and run the call."""
        if call.writes:
            return func(*args, **kwargs)
        is_alone = frame.leaves_alone() or (is_dynamo_compiling() and in_function() and not frame.in_function)
        action = None if is_alone else self.action_at(frame.module, call.op.name, index)
        if isinstance(action, str) and action in self._executors:
            return self._executors[action](func, call, args, kwargs, (frame.module, call.op.name, index))
        is_unnamed = action is None
        if is_unnamed and agrees(call):
            action = PROMOTE
        if action is None and call.op.cast == "first":  # its parameters may be narrower than kernels take beside it
            action = (args[0] if args else kwargs["input"]).dtype
        if action is None or kwargs.get("max_norm") is not None or kwargs.get("sparse"):
            return func(*args, **kwargs)
        floats = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
        if not floats or any(t.dtype not in CASTABLE for t in floats):
            return func(*args, **kwargs)
        written = kwargs.get("out") if "out" in kwargs else args[0] if writes_first(call, kwargs) else None
        if written is not None:
            return self._call_writing(func, call, written, args, kwargs)
        dtype: Any = widest({t.dtype for t in floats}) if action == PROMOTE else action
        if is_unnamed and needs_fp32(call, dtype, floats[0].device.type):
            dtype = torch.float32
        if call.op.name in NORMS_THAT_NAME and kwargs.get("dtype") not in (None, dtype, torch.float32, torch.float64):
            return func(*args, **kwargs)
        if call.op.cast == "first":
            return call_norm(self.cast, func, args, kwargs, dtype)
        return self._call_all(func, args, kwargs, dtype)

    def action_at(self, module: str, op: str, index: int) -> Action:
        """Return what to do at a site."""
        return self._action_of(module, op, index)

    def is_emulated(self, op: str, index: int) -> bool:
        """Return whether a site of the running module computes its format by emulation."""
        action = self.action_at(self.frames[-1].module, op, index)
        return isinstance(action, str) and action in self._executors and self._executors[action].is_emulated

    def on_other(self, func: Any, call: Call, args: Any, kwargs: Any) -> Any:
        """Run a call without a site; what is assigned to a part of a tensor takes its dtype, mask or no mask."""
        if call.op.name == "setitem" and args[0].dtype in CASTABLE and isinstance(args[2], Tensor):
            args = (*args[:2], self.cast(args[2], args[0].dtype))
        if call.op.name in ALIKE or call.op.name in ALIKE_IN_FP32:
            return self._call_alike(func, call, args, kwargs)
        if call.op.name == "unflatten":  # the method calls super(), which torch.compile does not trace under a mode
            func = torch.unflatten
        if call.op.name in BACKWARD and not call.property_name:
            self.forget_weights()
            return self.on_backward(func, args, kwargs)
        return func(*args, **kwargs)

    def on_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward pass."""
        return func(*args, **kwargs)

    def _call_all(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        floats = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
        if any(t.dtype not in CASTABLE for t in floats):
            return func(*args, **kwargs)
        return func(*(self.cast(a, dtype) for a in args), **{k: self.cast(v, dtype) for k, v in kwargs.items()})

    def _call_alike(self, func: Any, call: Call, args: Any, kwargs: Any) -> Any:
        """Run a call that is no site and yet needs arguments of one dtype."""
        found = {t.dtype for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()}
        if not found or not found.issubset(CASTABLE):
            return func(*args, **kwargs)
        return self._call_all(func, args, kwargs, torch.float32 if call.op.name in ALIKE_IN_FP32 else widest(found))

    def _call_writing(self, func: Any, call: Call, written: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that writes to an argument: it computes in that argument's dtype."""
        if not agrees(call) or not isinstance(written, Tensor) or not written.is_floating_point():
            return func(*args, **kwargs)

        def adapted(value: Any) -> Any:
            return value if value is written else self.cast(value, written.dtype)

        return func(*(adapted(a) for a in args), **{k: adapted(v) for k, v in kwargs.items()})

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument in `dtype`: a floating tensor, or a tuple or list with such in it; others as they are."""
        if isinstance(value, Tensor):
            if value.dtype is dtype or not value.is_floating_point():
                return value
            if is_compiling():  # a compiler merges equal casts, and knows what is written in between
                return value.to(dtype)
            if type(value) is nn.Parameter:
                return self.cast_weight(value, dtype)
            return to_dtype(value, dtype)
        if isinstance(value, (tuple, list)) and any(True for _ in tensors_in(value)):
            parts = [self.cast(part, dtype) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    @not_compiled_alone
    def cast_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` in `dtype`, cast once in one outermost forward, or once an optimizer step if it is large."""
        try:
            version = weight._version
        except RuntimeError:  # an inference tensor
            return to_dtype(weight, dtype)
        key, casts = id(weight), self.casts[dtype]
        entry = casts.get(key)
        if entry is not None:
            one, its_version, cast = entry
            if one is weight and its_version == version and _can_be_shared(weight, cast):
                return cast
        kept = self.kept_casts if weight.numel() >= SMALLEST and is_grad_enabled() else None
        cast = to_dtype(weight, dtype) if kept is None else kept.cast(weight, dtype, version)
        casts[key] = (weight, version, cast)
        return cast


def _can_be_shared(weight: Tensor, cast: Tensor) -> bool:
    """Return whether `cast` leads back to its weight where that is asked, and belongs to no ended mode or transform."""
    if cast.requires_grad is not weight.requires_grad and is_grad_enabled():
        return False
    if cast.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(cast)
