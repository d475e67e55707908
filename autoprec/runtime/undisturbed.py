"""Running a step that leaves no trace: gradients, buffers, random states and module flags are put back afterwards.

Not put back: plain attributes of modules that `forward` changes (a counter, a cache), generators of the model's own,
and what hooks of the model do outside of it.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Undisturbed:
    """Holds what one step of `model` on `batch` may change, and puts it back; also when the step raises.

    Buffers are copied beforehand, as kernels such as batch norm write to them without saying so. Parameters and the
    batch are copied when the first kernel that writes to them comes by (`before`), which is rare.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._model = model
        self._inputs = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._owners: dict[int, torch.Tensor] = {}
        for tensor in (*model.parameters(), *self._inputs):
            key = _storage(tensor)
            if key is not None:
                self._owners.setdefault(key, tensor)
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: dict[torch.Tensor, torch.Tensor | None] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put everything back at the end of this block."""
        with ExitStack() as stack:
            stack.enter_context(_random_states(self._model))
            stack.callback(_restore_modules, _module_states(self._model))
            stack.callback(self._restore_written)
            hooks = [(p, dict(found)) for p in self._model.parameters() if (found := _after_accumulation(p))]
            for parameter, _ in hooks:  # an optimizer may step in them
                _after_accumulation(parameter).clear()
            for parameter, found in hooks:
                stack.callback(_after_accumulation(parameter).update, found)
            stack.callback(self._restore_gradients)
            self.set_gradients_aside((*self._model.parameters(), *self._inputs))
            yield

    def set_gradients_aside(self, leaves: Any) -> None:
        """Give leaves a `.grad` of None until the end; those that are known already stay as they are."""
        for leaf in leaves:
            if leaf.is_leaf and leaf.requires_grad and leaf not in self._gradients:
                self._gradients[leaf] = leaf.grad
                leaf.grad = None

    def before(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Copy what the kernel that comes next writes to, if it is a parameter or belongs to the batch."""
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for argument, value in _bound(schema, args, kwargs):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                owner = self._owners.pop(_storage(tensor) or -1, None) if isinstance(tensor, torch.Tensor) else None
                if owner is not None:
                    self._written.append((owner, owner.detach().clone()))

    def _restore_written(self) -> None:
        with torch.no_grad():
            for tensor, copy in self._written:
                tensor.copy_(copy)

    def _restore_gradients(self) -> None:
        for leaf, gradient in self._gradients.items():
            leaf.grad = gradient


def leaves_behind(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves whose `.grad` a backward pass from `tensor` adds to."""
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        pending += [parent for parent, _ in node.next_functions]


def _bound(schema: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(schema.arguments, args, strict=False)
    yield from ((argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs)


def _storage(tensor: torch.Tensor) -> int | None:
    """Return what tells the storage of a tensor from others; None for a tensor without one of its own."""
    try:
        return tensor.untyped_storage()._cdata or None
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers
        return None


def _after_accumulation(parameter: torch.Tensor) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _module_states(model: nn.Module) -> list[tuple[nn.Module, bool, dict[str, Any]]]:
    """Return each module with its training flag, and its buffers with copies of what they hold."""
    return [
        (
            module,
            module.training,
            {k: (b, None if b is None else b.detach().clone()) for k, b in module._buffers.items()},
        )
        for module in model.modules()
    ]


def _restore_modules(states: list[tuple[nn.Module, bool, dict[str, Any]]]) -> None:
    with torch.no_grad():
        for module, training, buffers in states:
            module.training = training
            for key, (buffer, copy) in buffers.items():
                module._buffers[key] = buffer
                if buffer is not None and not torch.equal(buffer, copy):
                    buffer.copy_(copy)


@contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    """Put back the random states of torch on the CPU and the model's devices, of Python, and of numpy if it is used."""
    devices = sorted({t.device.index or 0 for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"})
    python_state = random.getstate()
    numpy = sys.modules.get("numpy.random")
    numpy_state = None if numpy is None else numpy.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.set_state(numpy_state)
