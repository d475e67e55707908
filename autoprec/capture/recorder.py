"""The recording mode: writes every tensor operation of a running forward and loss into a `torch.fx.Graph`.

It watches the computation while it really happens, so control flow may depend on data, modules may be shared and
Python may do as it likes: what ran is what is recorded. Numbers that leave the tensors (`.item()`, `.shape`, a
comparison in an `if`) become constants of the recording.
"""

import operator
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from autoprec.capture.facts import digest, scalars_in, source_line, tensors_in_tree
from autoprec.capture.targets import is_importable, is_plain, target_of
from autoprec.errors import CaptureError
from autoprec.graph.opgraph import TensorMeta
from autoprec.graph.site import Site
from autoprec.runtime.calls import EFFECTS, Call
from autoprec.runtime.site_mode import Frame, SiteMode


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return shape, dtype and `requires_grad` of a tensor as a plain value."""
    return TensorMeta(
        shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), requires_grad=tensor.requires_grad
    )


def generator_at(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """Return a new random generator in `state`: a recorded draw starts from where the real one did."""
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


class Recorder(SiteMode):
    """Records calls into `graph`; constants and opaque callables go to `attributes`, by the name of their get_attr.

    `named` maps the tensors known beforehand (parameters, buffers) to their qualified names.
    """

    def __init__(self, named: dict[str, torch.Tensor], *, digests: bool = False) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.written: set[str] = set()
        self.calls: dict[str, int] = {}
        self._digests = digests
        self._values = cast("MutableMapping[torch.Tensor, fx.Node]", WeakTensorKeyDictionary())
        self._writers: dict[int, tuple[Any, fx.Node]] = {}  # by storage: a weak reference to it, and who wrote last
        self._names = cast("MutableMapping[torch.Tensor, str]", WeakTensorKeyDictionary())
        for name, tensor in reversed(named.items()):  # of several names of one tensor, the first one stays
            self._names[tensor] = name
        self._muted = 0
        self._order = 0

    # What the caller does

    def add_input(self, tensor: torch.Tensor) -> None:
        """Make `tensor` an input of the graph."""
        if tensor not in self._values:
            node = self.graph.placeholder(f"batch_{len(self.graph.nodes)}")
            node.meta.update(kind="input", outputs=(meta_of(tensor),))
            self._values[tensor] = node

    def finish(self, loss: torch.Tensor) -> None:
        """Make `loss` the output of the graph."""
        self.graph.output(self._node_of(loss)).meta["kind"] = "output"

    @contextmanager
    def frame(self, module: str) -> Iterator[None]:
        """Make `module` own the calls made in this block, and count it as one call of that module."""
        self.calls[module] = self.calls.get(module, -1) + 1
        with super().frame(module):
            yield

    @contextmanager
    def watching_functions(self) -> Iterator[None]:
        """Record each custom autograd Function and each functorch transform as one call for the time of the block.

        What runs inside has its own way back, or works on tensors that exist only there.
        """
        from torch._functorch import apis, eager_transforms

        places = [(apis, "vmap_impl"), (eager_transforms, "grad_impl"), (eager_transforms, "grad_and_value_impl")]
        originals = [(owner, name, getattr(owner, name)) for owner, name in places]
        apply = torch.autograd.Function.__dict__["apply"]

        def apply_once(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction:  # only saves memory: record what it runs
                with torch.enable_grad():
                    return args[0](*args[2:])
            return self._opaque(apply.__get__(None, cls), cls.__name__, args, kwargs)

        def once(original: Callable[..., Any], name: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._opaque(original, name, args, kwargs)

        torch.autograd.Function.apply = classmethod(apply_once)  # type: ignore[assignment]
        for owner, name, original in originals:
            setattr(owner, name, once(original, name.removesuffix("_impl")))
        try:
            yield
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            for owner, name, original in originals:
                setattr(owner, name, original)

    # What the mode sees

    def on_site(self, func: Any, call: Call, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        """Record a call that computes."""
        site = Site(frame.module, call.op.name, index)
        return self._record(func, call, site, args, kwargs, left_alone=frame.leaves_alone())

    def on_other(self, func: Any, call: Call, args: Any, kwargs: Any) -> Any:
        """Record a call without a site, unless it is a query."""
        return self._record(func, call, None, args, kwargs)

    # How it is written down

    def _record(
        self, func: Any, call: Call, site: Site | None, args: Any, kwargs: Any, *, left_alone: bool = False
    ) -> Any:
        if self._muted:
            return func(*args, **kwargs)
        tensors = list(tensors_in_tree((args, kwargs)))
        self._refuse_autocast(tensors)
        states = self._freeze_generators(args, kwargs)
        before = [_version(tensor) for tensor in tensors]
        inputs = tuple(meta_of(tensor) for tensor in tensors)
        result = func(*args, **kwargs)
        written = [t for t, version in zip(tensors, before, strict=True) if _version(t) != version]
        if not written and call.op.name not in EFFECTS and next(tensors_in_tree(result), None) is None:
            return result  # a query: its answer is a constant of the recording
        target, arguments = target_of(func, call, args)
        node = self._emit(target, arguments, kwargs, states)
        node.meta.update(op=call.op.name, inputs=inputs, left_alone=left_alone)
        node.meta["constants"] = tuple(scalars_in((args, kwargs)))
        node.meta["call"] = self.calls.get(self.frames[-1].module, 0)
        self._note(node, result, tensors, written)
        floats = any(meta.is_floating for meta in (*inputs, *node.meta["outputs"]))
        node.meta["site"] = site if floats else None  # integers have no format to choose
        return result

    def _opaque(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Record `function(*args, **kwargs)` as one call, whatever runs inside it."""
        if self._muted:
            return function(*args, **kwargs)
        tensors = list(tensors_in_tree((args, kwargs)))
        inputs = tuple(meta_of(tensor) for tensor in tensors)
        self._muted += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._muted -= 1
        node = self._emit(operator.call, (function, *args), kwargs, {})
        node.meta.update(op=name, site=None, inputs=inputs, left_alone=True, constants=())
        node.meta["call"] = self.calls.get(self.frames[-1].module, 0)
        self._note(node, result, tensors, [])
        return result

    def _emit(self, target: Any, args: Any, kwargs: Any, states: dict[int, fx.Node]) -> fx.Node:
        arguments = tuple(self._argument(a, states) for a in args)
        keywords = {k: self._argument(v, states) for k, v in kwargs.items()}
        if not is_importable(target):
            target, arguments = operator.call, (self._attribute(target), *arguments)
        return self.graph.call_function(target, arguments, keywords)

    def _note(self, node: fx.Node, result: Any, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Attach what is known of a recorded call and make its results the values of their tensors."""
        node.meta.update(kind="op", source=source_line())
        node.meta["module"] = self.frames[-1].module
        node.meta["order"] = self._order = self._order + 1
        node.meta["after"] = [w for t in read if (w := self._writer_of(t)) is not None and self._is_older(t, w)]
        for tensor in written:
            self._mark_written(tensor, node)
        outputs = list(tensors_in_tree(result))
        node.meta["outputs"] = tuple(meta_of(tensor) for tensor in outputs or written)
        if self._digests:
            node.meta["digest"] = tuple(digest(tensor) for tensor in outputs or written)
        self._bind(node, result)

    def _bind(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._values[result] = node
        elif isinstance(result, (tuple, list, dict)):
            for key, part in result.items() if isinstance(result, dict) else enumerate(result):
                if next(tensors_in_tree(part), None) is not None:
                    item = self.graph.call_function(operator.getitem, (node, key))
                    metas = tuple(meta_of(t) for t in tensors_in_tree(part))
                    item.meta.update(kind="op", op="getitem", outputs=metas, inputs=metas, source=node.meta["source"])
                    item.meta["call"] = node.meta["call"]
                    self._bind(item, part)

    def _argument(self, value: Any, states: dict[int, fx.Node]) -> Any:
        """Return `value` as an fx argument: tensors as their nodes, what fx cannot write down as an attribute."""
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, torch.Generator):
            return states[id(value)]
        if type(value) is torch.Size:
            return tuple(value)
        if type(value) in (tuple, list):
            return type(value)(self._argument(v, states) for v in value)
        if type(value) is dict:
            return {k: self._argument(v, states) for k, v in value.items()}
        if type(value) is slice:
            return slice(*(self._argument(v, states) for v in (value.start, value.stop, value.step)))
        return value if is_plain(value) else self._attribute(value)

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node that holds `tensor`, making one for a parameter, a buffer or a constant."""
        node = self._values.get(tensor)
        if node is not None:
            return node
        if tensor in self._names:
            name = self._names[tensor]
            node = self.graph.get_attr(name)
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            node.meta.update(kind=kind, target=name)
        else:
            fixed = tensor if tensor.requires_grad else tensor.detach().clone()
            node = self._attribute(fixed)
            if self._digests:
                node.meta["digest"] = (digest(tensor),)
        node.meta["outputs"] = (meta_of(tensor),)
        self._values[tensor] = node
        return node

    def _attribute(self, value: Any) -> fx.Node:
        """Return a get_attr node for a value that only an attribute can hold."""
        name = f"_constant_{len(self.attributes)}"
        self.attributes[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta.update(kind="constant", target=name)
        return node

    def _freeze_generators(self, args: Any, kwargs: Any) -> dict[int, fx.Node]:
        """Write down in which state each random generator among the arguments is before the call draws from it."""
        states: dict[int, fx.Node] = {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                state = self._attribute(value.get_state())
                states[id(value)] = self.graph.call_function(generator_at, (value.device, state))
                states[id(value)].meta.update(kind="op", op="generator_at", source="", outputs=(), inputs=(), call=0)
        return states

    # Memory that is written to

    def _writer_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """Return the last call that wrote to memory that `tensor` shares."""
        if not self._writers or tensor.layout != torch.strided:
            return None
        reference, writer = self._writers.get(tensor.untyped_storage()._cdata, (None, None))
        return writer if reference is not None and not reference.expired() else None

    def _is_older(self, tensor: torch.Tensor, writer: fx.Node) -> bool:
        """Return whether `tensor` was there before `writer` ran, so that only memory tells that it was changed."""
        holder = self._values.get(tensor)
        return holder is not writer and (holder is None or holder.meta.get("order", 0) < writer.meta["order"])

    def _mark_written(self, tensor: torch.Tensor, node: fx.Node) -> None:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            weak = StorageWeakRef(storage)
            self._writers[storage._cdata] = (weak, node)
        holder = self._values.get(tensor)
        if holder is not None and holder.op == "get_attr":
            self.written.add(str(holder.target))

    def _refuse_autocast(self, tensors: list[torch.Tensor]) -> None:
        device = tensors[0].device.type if tensors else "cpu"
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            raise CaptureError(
                f"recording: {source_line()} runs under torch.autocast, so its FP32 run is not FP32; "
                "remove autocast from the workload's model and loss: choosing the formats is autoprec's job"
            )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
