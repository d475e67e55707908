"""The recording mode: writes every tensor operation of a running forward and loss into a `torch.fx.Graph`.

It watches the computation while it really happens, so control flow may depend on data, modules may be shared and
Python may do as it likes: what ran is what is recorded. Numbers that leave the tensors (`.item()`, `.shape`, a
comparison in an `if`) become constants of the recording.
"""

import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from autoprec.capture.facts import digest, scalars_in, source_line, tensors_in_tree
from autoprec.capture.memory import Memory
from autoprec.capture.opaque import call_with_cells, cells_of
from autoprec.capture.random_state import DefaultRandom, generator_at, is_default
from autoprec.capture.refusals import refuse_modes, unsaved_write, unseen
from autoprec.capture.targets import is_foreign, is_importable, is_plain, target_of
from autoprec.capture.writes import Writers, made_to_require_grad, written_arguments
from autoprec.graph.opgraph import TensorMeta
from autoprec.graph.site import Site
from autoprec.ops import is_reflected
from autoprec.runtime.calls import EFFECTS, Call
from autoprec.runtime.site_mode import Frame, SiteMode


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return shape, dtype and `requires_grad` of a tensor as a plain value."""
    return TensorMeta(
        shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), requires_grad=tensor.requires_grad
    )


class Recorder(SiteMode):
    """Records calls into `graph`; constants and opaque callables go to `attributes`, by the name of their get_attr.

    `memory` knows the model's parameters and buffers by name, and learns what the step writes to. Make it where the
    default random generators are in the state that a replay starts from.
    """

    def __init__(self, memory: Memory, device: str, *, digests: bool = False) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.calls: dict[str, int] = {}
        self._memory = memory
        self._digests = digests
        self._values = cast("MutableMapping[torch.Tensor, fx.Node]", WeakTensorKeyDictionary())
        self._functions: dict[Any, fx.Node] = {}  # that an opaque call returned
        self._writers = Writers()
        self._names = cast("MutableMapping[torch.Tensor, str]", WeakTensorKeyDictionary())
        for name, tensor in reversed(memory.named.items()):  # of several names of one tensor, the first one stays
            self._names[tensor] = name
        self._muted = 0
        self._order = 0
        self._grad_enabled = True
        self._random = DefaultRandom(device)

    # What the caller does

    def add_input(self, tensor: torch.Tensor) -> None:
        """Make `tensor` an input of the graph."""
        if tensor not in self._values:
            node = self.graph.placeholder(f"batch_{len(self.graph.nodes)}")
            node.meta.update(kind="input", outputs=(meta_of(tensor),))
            self._values[tensor] = node
            self._memory.hold(str(node.target), tensor)

    def finish(self, loss: torch.Tensor) -> None:
        """Make `loss` the output of the graph."""
        output = self._node_of(loss)
        self._follow_grad_mode(enabled=True)
        self.graph.output(output).meta["kind"] = "output"
        for node in self.graph.nodes:
            if node.op == "get_attr" and not node.users:  # of a tensor that only queries read
                self.graph.erase_node(node)

    @contextmanager
    def frame(self, module: str, counts: Mapping[str, int] | None = None) -> Iterator[Frame]:
        """Make `module` own the calls made in this block, and count it as one call of that module."""
        self.calls[module] = self.calls.get(module, -1) + 1
        with super().frame(module, counts) as frame:
            yield frame

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
        if self._muted or call.op.name == "_set_grad_enabled":  # calls carry the grad mode that they ran in
            return func(*args, **kwargs)
        tensors = list(tensors_in_tree((args, kwargs)))
        refuse_modes(tensors)
        self._keep_constants(tensors)
        self._follow_random_state()
        states = self._freeze_generators(args, kwargs)
        announced = list(written_arguments(call, args, kwargs))
        for tensor in announced:
            self._memory.save(tensor)
        for tensor in (*announced, *made_to_require_grad(call, args)):
            self._memory.mark_written(tensor)
        before = [_version(tensor) for tensor in tensors]
        inputs = tuple(meta_of(tensor) for tensor in tensors)
        result = func(*args, **kwargs)
        self._random.note()
        written = self._written(tensors, before, announced)
        if not written and call.op.name not in EFFECTS and next(tensors_in_tree(result), None) is None:
            return result  # a query: its answer is a constant of the recording
        target, arguments = target_of(func, call, args)
        node = self._emit(target, arguments, kwargs, states)
        node.meta.update(op=call.op.name, inputs=inputs, left_alone=left_alone, writes=bool(announced))
        node.meta.update(constants=tuple(scalars_in((args, kwargs))), opaque=is_foreign(func))
        node.meta["reflected"] = is_reflected(getattr(func, "__name__", ""))
        self._note(node, result, tensors, written)
        floats = any(meta.is_floating for meta in (*inputs, *node.meta["outputs"]))
        node.meta["site"] = site if floats else None  # integers have no format to choose
        return result

    def opaque(self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record `function(*args, **kwargs)` as one call, whatever runs inside it."""
        if self._muted:
            return function(*args, **kwargs)
        cells = cells_of((function, *args), self._functions)
        tensors = list(tensors_in_tree((args, kwargs, cells)))
        self._keep_constants(tensors)
        self._follow_random_state()
        before = [_version(tensor) for tensor in tensors]
        inputs = tuple(meta_of(tensor) for tensor in tensors)
        self._muted += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._muted -= 1
        self._random.note()
        around = (call_with_cells, *zip(*cells, strict=True)) if cells else ()
        node = self._emit(operator.call, (*around, function, *args), kwargs, {})
        node.meta.update(op=name, site=None, inputs=inputs, left_alone=True, constants=(), opaque=True)
        self._note(node, result, tensors, self._written(tensors, before, []))
        if type(result) is tuple:  # vjp returns a function too
            return tuple(self._returned(part, node, index) for index, part in enumerate(result))
        return result

    def _returned(self, part: Any, node: fx.Node, index: int) -> Any:
        """Return a part of the result of the opaque call `node`; a function so that its calls are opaque as well."""
        if not isinstance(part, types.FunctionType):
            return part

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.opaque(part, f"{node.meta['op']}_function", args, kwargs)

        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta.update(kind="op", op="getitem", outputs=(), inputs=(), source=node.meta["source"])
        item.meta["call"] = node.meta["call"]
        self._functions[part] = self._functions[run] = item
        return run

    def _emit(self, target: Any, args: Any, kwargs: Any, states: dict[int, fx.Node]) -> fx.Node:
        self._follow_grad_mode(enabled=torch.is_grad_enabled())
        arguments = tuple(self._argument(a, states) for a in args)
        keywords = {k: self._argument(v, states) for k, v in kwargs.items()}
        if not is_importable(target):
            target, arguments = operator.call, (self._attribute(target), *arguments)
        return self.graph.call_function(target, arguments, keywords)

    def _follow_grad_mode(self, *, enabled: bool) -> None:
        """Have the graph switch autograd on or off here, if it is not as it should be: `no_grad`, `inference_mode`."""
        if enabled != self._grad_enabled:
            self._effect(torch._C._set_grad_enabled, (enabled,))
            self._grad_enabled = enabled

    def _follow_random_state(self) -> None:
        """Have the graph set the default random generators here, if the step did so since the last call."""
        for set_state, (state, *where) in self._random.set_since():
            self._effect(set_state, (self._attribute(state), *where))

    def _effect(self, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta.update(kind="op", op=function.__name__, source="", outputs=(), inputs=(), call=0)
        return node

    def _note(self, node: fx.Node, result: Any, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Attach what is known of a recorded call and make its results the values of their tensors."""
        node.meta.update(kind="op", source=source_line())
        node.meta["module"] = module = self.frames[-1].module
        node.meta["call"] = self.calls.get(module, 0)
        node.meta["order"] = self._order = self._order + 1
        node.meta["after"] = [w for t in read if (w := self._writers.before(t, self._values.get(t))) is not None]
        for tensor in written:
            self._writers.note(tensor, node)
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
            return states.get(id(value))
        if isinstance(value, types.FunctionType) and value in self._functions:
            return self._functions[value]
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
        elif tensor.grad_fn is not None:
            raise unseen(tensor)
        else:
            node = self._attribute(self._memory.constant(tensor))
            if self._digests:
                node.meta["digest"] = (digest(tensor),)
            self._memory.hold(str(node.target), tensor)
        node.meta["outputs"] = (meta_of(tensor),)
        self._values[tensor] = node
        return node

    def _keep_constants(self, tensors: list[torch.Tensor]) -> None:
        """Keep the values of tensors from outside the model before the call that reads them may write to them."""
        for tensor in tensors:
            if tensor not in self._values and tensor not in self._names and tensor.grad_fn is None:
                self._node_of(tensor)

    def _attribute(self, value: Any) -> fx.Node:
        """Return a get_attr node for a value that only an attribute can hold."""
        name = f"_constant_{len(self.attributes)}"
        self.attributes[name] = value.copy() if isinstance(value, np.ndarray) else value
        node = self.graph.create_node("get_attr", name)
        node.meta.update(kind="constant", target=name)
        return node

    def _freeze_generators(self, args: Any, kwargs: Any) -> dict[int, fx.Node]:
        """Write down in which state each random generator among the arguments is before the call draws from it."""
        states: dict[int, fx.Node] = {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and not is_default(value):
                state = self._attribute(value.get_state())
                states[id(value)] = self._effect(generator_at, (value.device, state))
        return states

    def _written(
        self, tensors: list[torch.Tensor], before: list[int], announced: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return those of `tensors` that a call wrote to; tensors of the inference mode do not tell afterwards."""
        written = [t for t, version in zip(tensors, before, strict=True) if _version(t) != version]
        written += [tensor for tensor in announced if tensor.is_inference()]
        for tensor in written:
            if not self._memory.mark_written(tensor):
                raise unsaved_write()
        return written


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
