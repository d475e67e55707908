"""The reduced internal precision of FP32 matmuls, convolutions and RNNs, set and put back.

torch keeps these settings in a tree: generic -> backend -> op. A node that holds "none" follows its parent, and what
torch reports for a node is the value that it follows, so putting a reported value back could cut a node off from its
parent. Nodes are addressed through `torch._C`, which is what the attributes `torch.backends.*.fp32_precision` call,
because assigning `torch.backends.mkldnn.fp32_precision` writes the generic node (torch 2.13).
The legacy switches (`allow_tf32`, `torch.set_float32_matmul_precision`) are not touched; reading them while this one
is set to another precision than they are raises in torch.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, TracebackType
from typing import Literal, TypeAlias, get_args

import torch

from autoprec.errors import DeviceError

Float32Matmul: TypeAlias = Literal["ieee", "tf32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backend:
    """The node of torch's tree that a device kind follows, and the reduced precisions that torch lets it have."""

    name: str | None
    reduced: tuple[Float32Matmul, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class MatmulState:
    """What the nodes of one device kind held: (backend, op) -> stored value, for `restore`.

    Nodes that `set_float32_matmul` had no need to write are not in it.
    """

    kind: str
    stored: dict[tuple[str, str], str]


_BACKENDS: Mapping[str, _Backend] = MappingProxyType(
    {
        "cpu": _Backend(name="mkldnn", reduced=("tf32", "bf16")),
        "cuda": _Backend(name="cuda", reduced=("tf32",)),
        "mps": _Backend(name=None, reduced=()),
    }
)

_OPS = ("matmul", "conv", "rnn")


class _Turn:
    """A lock on the settings that one thread holds, any number of times, and that another thread may give back for it.

    That is what an `RLock` refuses, and what a backward pass needs that fails in a thread of torch's.
    """

    def __init__(self) -> None:
        self._taken = threading.Lock()
        self._thread: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._thread != me:  # only this thread writes its own number there
            self._taken.acquire()
            self._thread = me
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._depth == 1:
            _release_abandoned()
        self._depth -= 1
        if self._depth == 0:
            self._thread = None
            self._taken.release()

    def is_taken(self) -> bool:
        """Return whether a thread holds it, be it this one."""
        return self._taken.locked()


# Whoever reads the settings in order to put them back must not read what another thread has set for one call.
TURN = _Turn()


def set_float32_matmul(kind: str, precision: Float32Matmul) -> MatmulState:
    """Set the precision inside FP32 matmuls, convolutions and RNNs on devices of `kind`; return the state found.

    The setting is global to the process. `ieee` is plain FP32.
    Raises: `DeviceError` if a precision would change nothing on this device, or if `kind` is unknown or not there.
    """
    allowed = supported(kind)
    if precision not in allowed:
        raise DeviceError(
            f'float32_matmul "{precision}" changes nothing on this {kind} device; it supports: {", ".join(allowed)}'
        )
    with TURN:
        return _write(kind, precision)


def restore(state: MatmulState) -> None:
    """Put back what `set_float32_matmul` found, also whether a node followed its parent.

    One exception is torch's: the initial "tf32" of CUDA convolutions and RNNs yields to a generic setting until it is
    written once; put back, it reads the same but no longer yields.
    """
    with TURN:
        put_back(state)


def put_back(state: MatmulState) -> None:
    """Do what `restore` does; the caller holds `TURN`."""
    for (backend, op), value in state.stored.items():
        torch._C._set_fp32_precision_setter(backend, op, value)


_claims: list["weakref.ref[MatmulState]"] = []
_abandoned: list[MatmulState] = []


def claim_float32_matmul(kind: str, precision: Float32Matmul) -> MatmulState:
    """Set the precision as `set_float32_matmul` does, on behalf of somebody who gives it back in any order.

    Raises: `DeviceError` as `set_float32_matmul` does.
    """
    with TURN:
        return _claim(set_float32_matmul(kind, precision))


def release(claim: MatmulState) -> None:
    """Give back a claim: the last one restores what it found, an earlier one leaves that to the one after it."""
    with TURN:
        _release(claim)


def release_with(owner: object, claim: MatmulState) -> Callable[[], object]:
    """Give `claim` back when `owner` dies, unless what is returned is called before, which gives it back at once.

    An owner may die at any moment, also while a thread has set the precision for one call: the claim then waits until
    that is put back.
    """
    whole = weakref.finalize(owner, _abandon, claim)
    whole.atexit = False

    def now() -> None:
        if whole.detach() is not None:
            release(claim)

    return now


def _abandon(claim: MatmulState) -> None:
    _abandoned.append(claim)
    if not TURN.is_taken():
        with TURN:
            pass  # whoever gives the turn back releases what was abandoned


def _release_abandoned() -> None:
    while _abandoned:
        _release(_abandoned.pop())


def _release(claim: MatmulState) -> None:
    alive = [found for reference in _claims if (found := reference()) is not None]
    place = next(index for index, each in enumerate(alive) if each is claim)
    later = next((each for each in alive[place + 1 :] if each.kind == claim.kind), None)
    if later is None:
        put_back(claim)
    else:
        later.stored.update(claim.stored)
    _claims[:] = [weakref.ref(each) for each in alive if each is not claim]


def _claim(state: MatmulState) -> MatmulState:
    _claims.append(weakref.ref(state, lambda gone: _claims.remove(gone) if gone in _claims else None))
    return state


def set_for_call(kind: str, precision: Float32Matmul, ops: Sequence[str]) -> MatmulState:
    """Set the precision inside `ops` (of matmul, conv, rnn) without a look at the device; the caller holds `TURN`."""
    return _write(kind, precision, ops)


def supported(kind: str) -> tuple[Float32Matmul, ...]:
    """Return the precisions that make a difference on the device of `kind`: `ieee`, and those a matmul shows to reduce.

    torch accepts a precision that the hardware lacks and computes IEEE, so it is found out by multiplying; once a
    process.
    Raises: `DeviceError` if `kind` is unknown or no such device is there.
    """
    _backend_of(kind)
    return _supported(kind)


def internal_precision(kind: str, op: str) -> str:
    """Return the precision that FP32 ops of `op` (matmul, conv, rnn) have inside on devices of `kind` now."""
    backend = _BACKENDS.get(kind)
    reported = "none" if backend is None or backend.name is None else _reported(backend.name, op)
    return "ieee" if reported == "none" else reported


def _backend_of(kind: str) -> _Backend:
    backend = _BACKENDS.get(kind)
    if backend is None:
        raise DeviceError(f'"{kind}" is not a device kind; kinds: {", ".join(_BACKENDS)}')
    return backend


@cache
def _supported(kind: str) -> tuple[Float32Matmul, ...]:
    if not torch.get_device_module(kind).is_available():
        raise DeviceError(f"no {kind} device is there to multiply on; use another kind or a machine that has one")
    reduced = (precision for precision in _BACKENDS[kind].reduced if _changes_a_matmul(kind, precision))
    return ("ieee", *reduced)


def _changes_a_matmul(kind: str, precision: Float32Matmul) -> bool:
    """Return whether a product by the identity, exact in any order of summation, loses bits under `precision`."""
    operand = torch.full((256, 256), 1 + 2.0**-12, device=kind)  # the 12th fraction bit exists in fp32 alone
    identity = torch.eye(256, device=kind)
    found = _write(kind, precision)
    try:
        return not torch.equal(operand @ identity, operand)
    finally:
        restore(found)


def _write(kind: str, precision: Float32Matmul, written: Sequence[str] = _OPS) -> MatmulState:
    """Write `precision` to the nodes of `kind` that report something else, and return what those held."""
    if precision not in get_args(Float32Matmul):
        raise DeviceError(f'"{precision}" is not a precision; precisions: {", ".join(get_args(Float32Matmul))}')
    backend = _backend_of(kind).name
    stored: dict[tuple[str, str], str] = {}
    if backend is not None:
        ops = [op for op in written if _reported(backend, op) != precision]
        stored = {(backend, op): _stored(backend, op) for op in ops}
        for op in ops:
            torch._C._set_fp32_precision_setter(backend, op, precision)
    return MatmulState(kind=kind, stored=stored)


def _reported(backend: str, op: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, op))


def _stored(backend: str, op: str) -> str:
    """Return what the node itself holds: "none" if it reports its parent's value, otherwise the value it reports."""
    reported = _reported(backend, op)
    if reported == "none":
        return reported
    parent, parent_op = ("generic", "all") if op == "all" else (backend, "all")
    parent_stored = _reported(parent, parent_op) if op == "all" else _stored(parent, parent_op)
    if _reported(parent, parent_op) != reported:
        return reported
    other = "ieee" if reported != "ieee" else "tf32"
    torch._C._set_fp32_precision_setter(parent, parent_op, other)
    follows = _reported(backend, op) == other
    torch._C._set_fp32_precision_setter(parent, parent_op, parent_stored)
    return "none" if follows else reported
