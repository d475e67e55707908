"""One recorded call taken out of its step: its signature, and blocks of it that can be timed in any format."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

from autoprec.capture.facts import tensors_in_tree
from autoprec.graph.opgraph import OpNode
from autoprec.runtime.calls import Call, describe
from autoprec.runtime.cast_mode import CastMode
from autoprec.runtime.plans import CASTABLE, ModulePlans
from autoprec.runtime.site_mode import Frame
from autoprec.runtime.weight_casts import to_dtype

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

# Numbers that kernels have branches for; of all others only the type is part of a signature.
_TELLING = frozenset({0.0, 0.5, 1.0, 2.0, 3.0, -0.5, -1.0, -2.0})
_SMALL = 2**16  # elements; statistics, which norms write to without telling, are no larger
_CACHED_BYTES = 2**19  # what a core is sure to find in a cache of its own when it comes back to it
_EVICTING_BYTES = 2**25


def signature_of(func: Any, arguments: Arguments, *, grad: bool) -> str:
    """Return what the time of a call depends on: function, shapes, strides, dtypes, and the constants that matter.

    Equal for equal calls of other layers and in other processes. `grad` says whether autograd records the call.
    """
    seen: dict[int, int] = {}
    parts = ", ".join(_describe(value, seen) for value in (*arguments[0], *sorted(arguments[1].items())))
    return f"{_name_of(func)}({parts})" + ("" if grad else " no_grad")


def _name_of(func: Any) -> str:
    home = getattr(func, "__module__", None) or getattr(getattr(func, "__objclass__", None), "__module__", "") or ""
    return f"{home}.{getattr(func, '__qualname__', None) or func}".lstrip(".")


def _describe(value: Any, seen: dict[int, int]) -> str:
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return f"={seen[id(value)]}"
        seen[id(value)] = len(seen)
        strides = "" if value.is_contiguous() else f"/{list(value.stride())}".replace(" ", "")
        shape = str(list(value.shape)).replace(" ", "")
        return f"{str(value.dtype)[6:]}{shape}{strides}{'*' if value.requires_grad else ''}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_describe(part, seen) for part in value)})"
    if isinstance(value, dict):
        return _describe(sorted(value.items()), seen)
    if isinstance(value, slice):
        return f"{value.start}:{value.stop}:{value.step}"
    if isinstance(value, float):
        return str(value) if value in _TELLING else "float"
    plain = isinstance(value, (bool, int, str, torch.dtype, torch.memory_format)) or value is None
    return str(value) if plain else type(value).__name__


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each tensor in its tuples, lists, dicts and slices replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(map_tensors(part, change) for part in (value.start, value.stop, value.step)))
    return value


def cast_arguments(func: Any, node: OpNode, arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Return the arguments as the call gets them in `dtype`: cast as the runtime casts those of a site.

    A call that no policy casts gets what its producers made: there all floating tensors are in `dtype`.
    """
    args, kwargs = arguments
    if node.site is None or not node.is_castable:
        cast = map_tensors((args, kwargs), lambda each: to_dtype(each, dtype) if each.dtype in CASTABLE else each)
        return cast[0], cast[1]
    mode = CastMode(_no_plans, lambda *_: dtype, {})
    found: list[Arguments] = []

    def take(*args: Any, **kwargs: Any) -> None:
        found.append((args, kwargs))

    mode.on_site(take, describe(func), Frame(node.site.module), node.site.index, args, kwargs)
    return found[0]


def _no_plans(module: str) -> ModulePlans:
    raise AssertionError(module)


def writes(node: OpNode, call: Call, arguments: Arguments) -> bool:
    """Return whether the call writes to one of its arguments."""
    kwargs = arguments[1]
    return node.writes or call.writes_first or bool(call.writes) or kwargs.get("inplace") is True or "out" in kwargs


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What one call returns and keeps for its backward pass.

    `outputs` are the dtypes of the tensors it returns; `saved_inputs` and `saved_outputs` the places of the tensors
    whose memory is kept, among its tensor arguments and its results; `fresh_bytes` is memory that only autograd sees.
    """

    outputs: tuple[str, ...] = ()
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    fresh_bytes: int = 0


@dataclass(eq=False)
class IsolatedCall:
    """A call on its own arguments; with `copies`, each repetition gets a copy of them, since it writes to them.

    `gradients` are those of results drawn so far, by shape, strides and dtype. Where the tensors are large, the caches
    of a CPU are as in a step: arguments and gradients were just written, what is saved and what is written to is cold.
    """

    func: Callable[..., Any]
    arguments: Arguments
    copies: bool = False
    grad: bool = field(default_factory=torch.is_grad_enabled)
    gradients: dict[Any, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def is_cold(self) -> bool:
        """Return whether the tensors are too large to stay in the caches of a CPU."""
        tensors = list(tensors_in_tree(self.arguments))
        on_cpu = all(each.device.type == "cpu" for each in tensors)
        return on_cpu and sum(each.numel() * each.element_size() for each in tensors) > _CACHED_BYTES

    def fresh(self) -> tuple[Arguments, list[torch.Tensor]]:
        """Return arguments whose gradients go nowhere else, and those of them that have one."""
        leaves: list[torch.Tensor] = []
        made: dict[int, torch.Tensor] = {}  # a tensor that is given twice stays one

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                own = tensor.detach().clone() if self.is_cold and is_dense(tensor) else tensor.detach()
                if self.grad and tensor.requires_grad:
                    leaves.append(own.requires_grad_())
                made[id(tensor)] = own.clone() if self.copies else own
            return made[id(tensor)]

        args, kwargs = map_tensors(self.arguments, leaf)
        return (args, kwargs), leaves

    def block(self, count: int) -> "CallBlock":
        """Return `count` calls that are timed together."""
        if self.is_cold:
            _evict()
        return CallBlock(self, [self.fresh() for _ in range(count)])

    def kept(self) -> Kept:
        """Return what the call returns and saves; runs it once."""
        (args, kwargs), _ = self.fresh()
        given = _places(tensors_in_tree((args, kwargs)))
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout == torch.strided:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        with saved_tensors_hooks(note, lambda each: each):
            results = list(tensors_in_tree(self.func(*args, **kwargs)))
        returned = {key: place for key, place in _places(results).items() if key not in given}
        return Kept(
            outputs=tuple(str(each.dtype).removeprefix("torch.") for each in results),
            saved_inputs=tuple(sorted(given[key] for key in saved if key in given)),
            saved_outputs=tuple(sorted(returned[key] for key in saved if key in returned)),
            fresh_bytes=sum(size for key, size in saved.items() if key not in given and key not in returned),
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory, in whatever order of dimensions."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _evicting() -> torch.Tensor:
    return torch.zeros(_EVICTING_BYTES // 4)


def _evict() -> None:
    """Fill the caches of the CPU with something else."""
    with torch.no_grad():
        _evicting().add_(1.0)


def free_evicting() -> None:
    """Free what the caches were filled with."""
    _evicting.cache_clear()


def _places(tensors: Any) -> dict[int, int]:
    places: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        if tensor.layout == torch.strided:
            places.setdefault(tensor.untyped_storage().data_ptr(), place)
    return places


class CallBlock:
    """Calls with arguments of their own each, run one after the other; one backward pass takes all their gradients.

    Gradients of the results are normal random numbers.
    """

    def __init__(self, call: IsolatedCall, calls: list[tuple[Arguments, list[torch.Tensor]]]) -> None:
        self._call, self._calls = call, calls
        self._leaves = [leaf for _, leaves in calls for leaf in leaves]
        self._results: list[Any] = []

    def forward(self) -> None:
        """Run every call."""
        func = self._call.func
        self._results = [func(*args, **kwargs) for (args, kwargs), _ in self._calls]

    def prepare_backward(self) -> None:
        """Draw the gradients of what `forward` returned."""
        self._roots = [each for each in tensors_in_tree(self._results) if each.requires_grad]
        drawn, is_cold = self._call.gradients, self._call.is_cold
        if is_cold:
            _evict()
        self._gradients = []
        for root in self._roots:
            key = (root.shape, root.dtype, root.stride())
            if key not in drawn:
                drawn[key] = torch.randn_like(root, requires_grad=False)
            self._gradients.append(drawn[key].clone() if is_cold else drawn[key])

    def backward(self) -> None:
        """Run the backward passes of what `forward` computed."""
        if self._roots and self._leaves:
            torch.autograd.grad(self._roots, self._leaves, self._gradients, allow_unused=True)


def isolated(func: Any, node: OpNode, arguments: Arguments, dtype: torch.dtype | None) -> IsolatedCall:
    """Return a recorded call as it runs in `dtype`, or as it was recorded without one, and touches nothing else."""
    call = describe(func)
    own = _own_state(arguments)
    cast = own if dtype is None else cast_arguments(func, node, own, dtype)
    return IsolatedCall(func, cast, copies=writes(node, call, arguments))


def _own_state(arguments: Arguments) -> Arguments:
    """Return arguments whose small tensors without gradient, and whose random generators, are copies."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        is_state = not tensor.requires_grad and tensor.is_floating_point() and tensor.numel() <= _SMALL
        return tensor.clone() if is_state else tensor

    args, kwargs = map_tensors(arguments, own)
    args = tuple(each.clone_state() if isinstance(each, torch.Generator) else each for each in args)
    kwargs = {k: each.clone_state() if isinstance(each, torch.Generator) else each for k, each in kwargs.items()}
    return args, kwargs
