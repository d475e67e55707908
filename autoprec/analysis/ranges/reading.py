"""One call as a range rule reads it: the intervals, numbers and shapes of its arguments."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoprec.analysis.ranges.interval import TOP, Interval, fit, largest, point
from autoprec.graph.opgraph import OpGraph, OpNode, Ref

Shape: TypeAlias = tuple[int, ...]

_MISSING = object()


class Reading:
    """The arguments of the call `node`, of which `interval_of` tells what the values of earlier nodes can be.

    `is_pure`: nothing in the graph writes to memory, so a name stands for the same values wherever it is read.
    """

    __slots__ = ("_graph", "_interval_of", "is_pure", "node")

    def __init__(self, node: OpNode, graph: OpGraph, interval_of: Callable[[str], Interval], *, is_pure: bool) -> None:
        self.node = node
        self.is_pure = is_pure
        self._graph = graph
        self._interval_of = interval_of

    def value(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument as it was given, by place or by name."""
        if place < len(self.node.args):
            return self.node.args[place]
        return self.node.kwargs.get(name, default)

    def interval(self, place: int, name: str = "", default: Interval = TOP) -> Interval:
        """Return the interval of a tensor or number; `default` where the argument is missing or None."""
        value = self.value(place, name, None)
        return default if value is None else self.interval_in(value)

    def interval_in(self, value: Any) -> Interval:
        """Return the interval of an argument that was read by `value`."""
        if isinstance(value, Ref):
            return self._interval_of(value.name)
        if not _is_number(value):
            return TOP
        dtype = self.node.outputs[0].dtype if self.node.outputs else ""
        return fit(point(float(value)), dtype) if largest(dtype) is not None else point(float(value))

    def intervals(self, place: int, name: str) -> list[Interval]:
        """Return the intervals of an argument that is a sequence of tensors."""
        value = self.value(place, name, ())
        return [self.interval_in(part) for part in (value if isinstance(value, tuple) else (value,))]

    def number(self, place: int, name: str, default: float | None = None) -> float | None:
        """Return a number given as such; `default` where it is missing, None for anything else."""
        value = self.value(place, name, _MISSING)
        if value is _MISSING:
            return default
        return value if _is_number(value) else None

    def given(self) -> Iterator[Any]:
        """Yield all arguments, nested ones too."""
        yield from flat(self.node.args)
        yield from flat(tuple(self.node.kwargs.values()))

    def shape(self, place: int, name: str = "input") -> Shape | None:
        """Return the shape of a tensor argument; None where it is no tensor of one known shape."""
        return self.shape_in(self.value(place, name, None))

    def shape_in(self, value: Any) -> Shape | None:
        """Return the shape of what an argument refers to."""
        if _is_number(value):
            return ()
        outputs = self._graph[value.name].outputs if isinstance(value, Ref) else ()
        return outputs[0].shape if len(outputs) == 1 else None

    def dtype(self, place: int, name: str = "input") -> str:
        """Return the dtype of a tensor argument, or nothing."""
        value = self.value(place, name, None)
        outputs = self._graph[value.name].outputs if isinstance(value, Ref) else ()
        return outputs[0].dtype if len(outputs) == 1 else ""

    def producer(self, place: int) -> OpNode | None:
        """Return the node whose result an argument is."""
        value = self.value(place, "")
        return self._graph[value.name] if isinstance(value, Ref) else None

    def size(self, place: int, name: str, dim: Any) -> int | None:
        """Return the size of a tensor argument along `dim`; None if that is not known."""
        shape = self.shape(place, name)
        if shape is None or not isinstance(dim, int):
            return None
        if not shape:
            return 1
        return shape[dim] if -len(shape) <= dim < len(shape) else None

    def num_reduced(self) -> int | None:
        """Return how many elements of the first argument make one element of the result; None if that is not known."""
        shape = self.shape(0)
        if shape is None or not self.node.outputs:
            return None
        num_out = self.node.outputs[0].numel
        return math.prod(shape) // num_out if num_out else 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How an op maps intervals: `apply` gives that of exact arithmetic, or one for each of several results.

    `num_roundings` bounds the relative error of the kernel in units of the dtype's spacing; 0 for ops that move
    numbers. `keeps_numbers`: no NaN comes of numbers if the result is bounded.
    """

    apply: Callable[[Reading], Interval | tuple[Interval, ...]]
    num_roundings: float = 1
    keeps_numbers: bool = False


def flat(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, dicts and slices."""
    if isinstance(value, tuple):
        for part in value:
            yield from flat(part)
    elif isinstance(value, dict):
        yield from flat(tuple(value.values()))
    elif isinstance(value, slice):
        yield from flat((value.start, value.stop, value.step))
    else:
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)  # booleans too: they fill and add as 0 and 1
