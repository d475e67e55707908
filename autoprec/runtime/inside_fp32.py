"""The precision inside FP32 matmuls, convolutions and RNNs at single sites, in their forward and backward kernels.

torch has one setting for the whole process, which kernels read when they are launched. It is set for exactly the call
of a site, and again for exactly the autograd nodes that this call made; one thread at a time does so. What another
thread launches in that moment without a rule of its own sees it too: torch knows no setting of a thread.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from autoprec.ops import Op
from autoprec.runtime import matmul_precision
from autoprec.runtime.matmul_precision import TURN, Float32Matmul, MatmulState
from autoprec.runtime.plans import CASTABLE, SiteKey

_FP32 = frozenset({torch.float32})

# The settings that the kernels of a family read; RNNs are made of matmuls where no kernel is fused.
_SETTINGS = {
    "matmul": ("matmul",),
    "convolution": ("conv",),
    "attention": ("matmul",),
    "recurrent": ("matmul", "rnn"),
}

# Which backward pass runs, so that what one leaves behind when it fails is told from what others are at. torch hands
# the context of whoever calls backward() to the threads that run it, under this name.
_backward: contextvars.ContextVar[object] = contextvars.ContextVar("autoprec_backward")
_CONTEXT = "context"
_ENGINE = "_engine_run_backward"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Hold:
    """The precision that a thread has set for a call or, in a backward pass, for a node."""

    inside: "InsideFp32"
    found: MatmulState
    thread: int
    backward: object | None
    first_node: int


_holds: list[_Hold] = []


def has_inside(op: Op) -> bool:
    """Return whether the kernels of `op` multiply, so that there is a precision inside."""
    return op.family in _SETTINGS


@dataclass(frozen=True, kw_only=True)
class InsideFp32:
    """Runs the calls of a site on FP32 tensors with `precision` inside; it is called in place of the torch function."""

    kind: str
    precision: Float32Matmul

    @property
    def is_emulated(self) -> bool:
        """Return False: a device without the precision is refused."""
        return False

    def __call__(self, func: Any, call: Any, args: Any, kwargs: Any, site: SiteKey) -> Any:  # noqa: ARG002
        """Return what the call computes; its backward, and that of its backward, run with the precision too."""
        dtypes = {each.dtype for each in _tensors((*args, *kwargs.values())) if each.is_floating_point()}
        if not dtypes or not dtypes.issubset(CASTABLE):
            return func(*args, **kwargs)
        if dtypes != _FP32 and not call.writes_first and kwargs.get("out") is None:  # those compute in what they write
            args, kwargs = pytree.tree_map(_fp32, (args, kwargs))
        if is_dynamo_compiling():
            _leave_to_python()
            return _run_between_graphs(self, _SETTINGS[call.op.family], func, args, kwargs)
        return _run(self, _SETTINGS[call.op.family], func, args, kwargs)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, bare or in tuples and lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _fp32(leaf: Any) -> Any:
    is_low = isinstance(leaf, torch.Tensor) and leaf.dtype in CASTABLE
    return leaf.to(torch.float32) if is_low else leaf


def _run(inside: InsideFp32, settings: tuple[str, ...], func: Any, args: Any, kwargs: Any) -> Any:
    hold = _set(inside, settings, None)
    try:
        result = func(*args, **kwargs)
    finally:
        _put_back(hold)
    if torch.is_grad_enabled():
        given = {each.grad_fn for each in _tensors((*args, *kwargs.values()))}
        _follow(inside, settings, list(_tensors((result,))), given, hold.first_node)
    return result


_run_between_graphs = _run


def _leave_to_python() -> None:
    """Have torch.compile not trace `_run_between_graphs`. Importing the compiler takes as long as importing torch."""
    global _run_between_graphs  # noqa: PLW0603
    if _run_between_graphs is _run:
        why = "torch.compile cannot trace a precision inside FP32 matmuls that holds for one call"
        _run_between_graphs = torch.compiler.disable(_run, reason=why)


_leave_to_python._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while tracing, as `describe` is


def _set(inside: InsideFp32, settings: tuple[str, ...], backward: object | None) -> _Hold:
    TURN.__enter__()
    try:
        hold = _Hold(
            inside=inside,
            found=matmul_precision.set_for_call(inside.kind, inside.precision, settings),
            thread=threading.get_ident(),
            backward=backward,
            first_node=torch._C._autograd._get_sequence_nr(),
        )
    except BaseException:
        TURN.__exit__(None, None, None)
        raise
    _holds.append(hold)
    return hold


def _put_back(hold: _Hold) -> None:
    if _holds and _holds[-1] is hold:  # otherwise a failed backward pass put it back
        _holds.pop()
        matmul_precision.put_back(hold.found)
        TURN.__exit__(None, None, None)


def _follow(
    inside: InsideFp32, settings: tuple[str, ...], results: list[Any], given: set[Any], first_node: int
) -> None:
    """Have the nodes between `results` and the nodes `given` run with the precision, and those that these make.

    A node made in this thread before the call has a smaller number; one made in another is told by being `given`.
    """
    todo = [each.grad_fn for each in results if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    seen = set(given)
    while todo:
        node = todo.pop()
        if node in seen or node._sequence_nr() < first_node or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        _hook(node, inside, settings, given)
        todo += [parent for parent, _ in node.next_functions if parent is not None]


def _hook(node: Any, inside: InsideFp32, settings: tuple[str, ...], given: set[Any]) -> None:
    holds: list[_Hold] = []

    def before(_: Any) -> None:
        holds[:] = [_set(inside, settings, _this_backward())]  # that of a failed backward is put back already

    def after(grads: Any, incoming: Any) -> None:
        hold = holds.pop()
        _put_back(hold)
        if torch.is_grad_enabled():  # create_graph=True: the gradients have nodes of their own
            known = given | {each.grad_fn for each in incoming if each is not None}
            _follow(inside, settings, list(grads), known, hold.first_node)

    node.register_prehook(before)
    node.register_hook(after)


def _this_backward() -> object | None:
    if torch._C._is_key_in_tls(_CONTEXT):
        context: contextvars.Context = torch._C._get_obj_in_tls(_CONTEXT)
        return context.get(_backward)
    return _backward.get(None)


@contextmanager
def set_aside() -> Iterator[None]:
    """Have the block run without what this thread has set for a node: activation checkpointing computes forwards there.

    They are the forwards of other sites, too, and open what they need by themselves.
    """
    hold = _holds[-1] if _holds else None
    if hold is None or hold.thread != threading.get_ident():
        yield
        return
    matmul_precision.put_back(hold.found)
    try:
        yield
    finally:
        matmul_precision.set_for_call(hold.inside.kind, hold.inside.precision, [op for _, op in hold.found.stored])


def put_back_after_failures() -> None:
    """Have a backward pass that fails inside a node put back what was set for the node. Idempotent.

    Nodes have hooks before and after them, and none for failing; so the one function through which
    `Tensor.backward` and `torch.autograd.grad` call the engine is wrapped, once a process.
    """
    run = getattr(torch.autograd, _ENGINE)
    if not hasattr(run, "autoprec_original"):
        setattr(torch.autograd, _ENGINE, _guarded(run))


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        this = object()
        token = _backward.set(this)
        try:
            return run(*args, **kwargs)
        except BaseException:
            while _holds and _holds[-1].backward is this:
                _put_back(_holds[-1])
            raise
        finally:
            _backward.reset(token)

    guarded.autoprec_original = run  # type: ignore[attr-defined]
    return guarded
