"""`find_overflow`: where the first non-finite value of a step comes from.

Infinities are ordinary in a step that trains: an attention mask holds them. So each kernel that makes non-finite values
of finite ones is noted, those that follow are traced through the tensors that hold them, and only the origin of what
reaches the loss or a gradient counts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from autoprec.graph.site import Site
from autoprec.runtime.kernels import base_name, floats_in, format_name
from autoprec.runtime.one_step import Loss, watch_step
from autoprec.runtime.precision import Precision
from autoprec.runtime.running import RUNNING
from autoprec.runtime.site_call import Phase, SiteCall
from autoprec.runtime.undisturbed import leaves_behind
from autoprec.runtime.watch import site_ahead

Where: TypeAlias = Literal["batch", "parameter", "buffer", "forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """Where the first non-finite value of a step that reached the loss or a gradient comes from.

    `place` says it in words. `site` is None for what was non-finite before the step, and for kernels between sites.
    `kernel` made it, in `format`; `largest` is the largest magnitude that it took, all of it finite. `advice` says
    what to do.
    """

    where: Where
    place: str
    site: Site | None
    kernel: str
    format: str
    largest: float
    loss_scale: float
    advice: str

    def __str__(self) -> str:
        if not self.kernel:
            return f"{self.place} holds non-finite values before the step begins; {self.advice}"
        return (
            f"first non-finite value in the {self.where}: {self.place}, kernel {self.kernel} in {self.format}, "
            f"largest input {self.largest:.4g}, loss scale {self.loss_scale:g}; {self.advice}"
        )


def find_overflow(precision: Precision, batch: Any, loss: Loss | None = None) -> Overflow | None:
    """Return where the first non-finite value of one step on `batch` comes from; None if loss and gradients are finite.

    The loss is scaled by the present loss scale. First is meant in the order of execution. `loss` and what the step
    leaves untouched are as in `trace`; every kernel's tensors are read, which takes much longer than the step itself.

    Raises: `TraceError` as `trace` does.
    """
    scale = precision.scaler.get_scale()
    origins = _Origins(precision, batch)
    watch_step("find_overflow", precision, batch, loss, probe=origins.probe, scale=scale, at_end=origins.finish)
    first = origins.first()
    return None if first is None else _overflow(first, scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Origin:
    """A place where non-finite values came into being, numbered in the order of execution."""

    number: int
    where: Where
    place: str
    site: Site | None = None
    kernel: str = ""
    taken: str = ""
    given: str = ""
    largest: float = 0.0
    is_written: bool = False


class _Origins:
    """The origins seen so far, and which tensors hold values that come from them."""

    def __init__(self, precision: Precision, batch: Any) -> None:
        self._origins: list[_Origin] = []
        self._reached: set[int] = set()
        self._by_storage: dict[int, tuple[Any, frozenset[int]]] = {}  # the storage is held, so its address stays its
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            self._known("batch", "the batch", leaf)
        for name, parameter in precision.model.named_parameters():
            self._known("parameter", f"parameter {name}", parameter)
        for name, buffer in precision.model.named_buffers():
            self._known("buffer", f"buffer {name}", buffer)
        self._parameters = list(precision.model.parameters())
        self._inputs = leaves

    def first(self) -> _Origin | None:
        """Return the first origin of what reached the loss or a gradient."""
        return self._origins[min(self._reached)] if self._reached else None

    def finish(self, loss: torch.Tensor) -> None:
        """Look which origins reached the loss and the gradients."""
        leaves = {id(leaf): leaf for leaf in (*leaves_behind(loss), *self._parameters, *self._inputs)}.values()
        for tensor in (loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)):
            if not _finite(tensor):
                found = self._origins_of(tensor)
                backward = frozenset(each.number for each in self._origins if each.where == "backward")
                self._reached |= found or backward or frozenset(range(len(self._origins)))

    @contextmanager
    def probe(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], phase: Phase, call: SiteCall | None
    ) -> Iterator[Callable[[Any], None]]:
        """Look at what a kernel takes and gives."""
        floats = list(floats_in((*args, *kwargs.values())))
        held = frozenset[int]().union(*(self._origins_of(tensor) for tensor in floats))
        largest = max((_magnitude(tensor) for tensor in floats), default=0.0) if not held else 0.0
        name = base_name(func)
        if name in _UNINITIALIZED:
            yield lambda _: None
            return

        def done(result: Any) -> None:
            broken = [tensor for tensor in floats_in((result,)) if not _finite(tensor)]
            if not broken:
                return
            origins = held or frozenset({self._note(func, floats, args, kwargs, phase, call, largest, broken[0])})
            for tensor in broken:
                self._hold(tensor, origins)

        yield done

    def _note(
        self,
        func: Any,
        floats: list[torch.Tensor],
        args: Any,
        kwargs: Mapping[str, Any],
        phase: Phase,
        call: SiteCall | None,
        largest: float,
        broken: torch.Tensor,
    ) -> int:
        place = _between() if call is None else f"site {call.site}"
        if call is None and phase == "backward" and (call := site_ahead()) is not None:
            place = f"the gradient on its way back into site {call.site}"
        written = any(isinstance(value, float) and value - value != 0 for value in (*args, *kwargs.values()))
        origin = _Origin(
            number=len(self._origins),
            where=phase,
            place=place,
            site=None if call is None else call.site,
            kernel=base_name(func),
            taken=format_name(floats[0].dtype) if floats else "",
            given=format_name(broken.dtype),
            largest=largest,
            is_written=written,
        )
        self._origins.append(origin)
        return origin.number

    def _known(self, where: Where, place: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and not _finite(tensor.detach()):
            number = len(self._origins)
            self._origins.append(_Origin(number=number, where=where, place=place))
            self._hold(tensor, frozenset({number}))

    def _hold(self, tensor: torch.Tensor, origins: frozenset[int]) -> None:
        storage = _storage(tensor)
        if storage is not None:
            known = self._by_storage.get(storage._cdata, (storage, frozenset()))[1]
            self._by_storage[storage._cdata] = (storage, known | origins)

    def _origins_of(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return where the non-finite values of `tensor` come from; none if it has none now."""
        storage = _storage(tensor)
        held = None if storage is None else self._by_storage.get(storage._cdata)
        return held[1] if held is not None and not _finite(tensor.detach()) else frozenset()


# What they hold before something is written to them is nobody's result.
_UNINITIALIZED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize"})


def _between() -> str:
    mode = RUNNING.mode
    module = mode.frames[-1].module if mode is not None else ""
    return f"between the sites of module {module}" if module else "between sites"


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers
        return None


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    values = tensor._values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(values).all())


def _magnitude(tensor: torch.Tensor) -> float:
    values = tensor.detach()
    values = values._values() if values.is_sparse else values
    finite = torch.nan_to_num(values.float(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max()) if finite.numel() else 0.0


def _overflow(origin: _Origin, scale: float) -> Overflow:
    is_cast = origin.kernel in ("_to_copy", "copy")
    return Overflow(
        where=origin.where,
        place=origin.place,
        site=origin.site,
        kernel=origin.kernel,
        format=f"{origin.taken} to {origin.given}" if is_cast else origin.given,
        largest=origin.largest,
        loss_scale=scale,
        advice=_advice(origin, scale),
    )


def _advice(origin: _Origin, scale: float) -> str:
    if origin.where == "batch":
        return "mend the data, or leave this batch out; no precision and no loss scale can"
    if origin.where in ("parameter", "buffer"):
        return "an earlier step has put them there: go back to a checkpoint before it, and look at the step that did"
    if origin.is_written:
        return "the code itself writes this infinity, and it reaches the loss: look at that mask or constant"
    wider = "bf16 or fp32" if origin.given == "fp16" else "fp32"
    rule = "" if origin.site is None else f'{{sites: "{origin.site}", format: fp32}}'
    if origin.where == "forward":
        mend = f"run it in {wider}" + (f", say by the rule {rule}" if rule else "")
        if origin.given not in ("fp16", "bf16"):
            mend = "look at its inputs: its format has the range of fp32"
        return f"a loss scale cannot mend an overflow of the forward; {mend}"
    if scale > 1:
        return (
            f"lower the loss scale (now {scale:g}): a dynamic one backs off by itself and skips the step, a static one "
            "needs a smaller loss_scale.initial" + (f"; or keep the site wide by the rule {rule}" if rule else "")
        )
    return f"the gradient leaves the range of {origin.given} without any loss scale: run it in {wider}"
