"""Which gradients are still multiplied by the loss scale, and whether somebody changed them in that state.

The identity and the version counter of every `.grad` are noted at the end of each scaled backward pass. Anything that
writes to a gradient afterwards (clipping above all) moves its counter; that the gradient was divided by the scale
before is known to the scaler alone. Nothing here reads a value, so nothing waits for the device.
Of DTensor gradients (FSDP2) torch moves no counter where `torch._foreach_*` functions write to them, as its clipping
does: there the counters are moved by hand. Not seen are such functions when others call them on DTensors.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Note = tuple[int, int]


class ScaledGradients:
    """Notes on the gradients of `parameters()`, which is asked once, at the first scaled backward pass.

    `is_scaled` says whether a loss was scaled since the last update of the scale.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._source = parameters
        self._parameters: tuple[torch.Tensor, ...] = ()
        self._scaled: dict[int, Note] = {}
        self._stepped: dict[int, Note] = {}
        self._mixed: set[int] = set()
        self.is_scaled = False

    def watch(self, scaled_loss: torch.Tensor) -> None:
        """Note the gradients around the backward pass from `scaled_loss`."""
        self.is_scaled = True
        if scaled_loss.requires_grad and not torch.compiler.is_compiling():
            if not self._parameters:
                self._parameters = tuple(self._source())
                if any(map(_is_sharded, self._parameters)):
                    _count_clipping()
            scaled_loss.register_hook(self._at_start)

    def note(self) -> None:
        """Take the gradients as they are now for scaled ones that nobody changed."""
        self._scaled = {id(p): _note(g) for p in self._parameters if (g := p.grad) is not None}
        self._stepped = {}

    def changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a gradient of the optimizer's was changed or exchanged since it was noted."""
        noted = self._scaled
        return any(
            key in noted and noted[key] != _note(gradient)
            for parameter in parameters_of(optimizer)
            if (gradient := parameter.grad) is not None and (key := id(parameter))
        )

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a gradient of the optimizer's is as a scaled backward pass left it."""
        noted = self._scaled
        return any(
            noted.get(id(parameter)) == _note(gradient)
            for parameter in parameters_of(optimizer)
            if (gradient := parameter.grad) is not None
        )

    def are_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer has a gradient of one of the parameters."""
        mine = {id(parameter) for parameter in self._source()}
        return any(id(parameter) in mine and parameter.grad is not None for parameter in parameters_of(optimizer))

    def mixed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a scaled gradient of the optimizer's was added to one that an earlier step left behind."""
        return bool(self._mixed) and any(
            id(parameter) in self._mixed for parameter in parameters_of(optimizer) if parameter.grad is not None
        )

    def note_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer stepped: what is left of its gradients belongs to no later step."""
        for parameter in parameters_of(optimizer):
            if (gradient := parameter.grad) is not None:
                self._stepped[id(parameter)] = _note(gradient)

    def _at_start(self, _: torch.Tensor) -> None:
        """Note what this pass adds to; what an earlier step divided by its scale must be gone by then.

        It is no error by itself: the generator's backward pass adds to a critic's gradients, which nobody uses.
        """
        if self._stepped or self._mixed:
            self._mixed = {
                id(p) for p in self._parameters if (g := p.grad) is not None and self._is_old(id(p), _note(g))
            }
        queue: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self.note))  # behind what DistributedDataParallel and its kind queue in between

    def _is_old(self, key: int, note: Note) -> bool:
        return self._stepped.get(key) == note or (key in self._mixed and self._scaled.get(key) == note)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


@functools.cache
def _count_clipping() -> None:
    """Have torch's two ways of clipping move the counters of DTensor gradients, once a process.

    `clip_grad_norm_`, which everybody imports by name, looks up what it calls in the end.
    """
    clip_grad = torch.nn.utils.clip_grad
    by_norm, by_value = _counting(clip_grad._clip_grads_with_norm_), _counting(clip_grad.clip_grad_value_)
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = by_norm
    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = by_value


def _counting(clip: Callable[..., Any]) -> Callable[..., Any]:
    """Return `clip`, which then moves the counters of the DTensors among the gradients."""

    @functools.wraps(clip)
    def counting(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        held = (parameters,) if isinstance(parameters, torch.Tensor) else tuple(parameters)
        result = clip(held, *args, **kwargs)
        sharded = [each.grad for each in held if each.grad is not None and _is_sharded(each.grad)]
        if sharded:
            torch.autograd.graph.increment_version(sharded)
        return result

    return counting


def _note(gradient: torch.Tensor) -> Note:
    return id(gradient), gradient._version
