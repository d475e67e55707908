"""What a replay tells about every node of a recorded step: its signature, its tensors, and whose memory they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoprec.capture import Recording, Replay
from autoprec.capture.facts import tensors_in_tree
from autoprec.graph.opgraph import OpNode
from autoprec.measure.op_call import Arguments, is_dense, signature_of
from autoprec.ops import lookup
from autoprec.runtime.plans import CASTABLE

_UNTIMED = frozenset({"query", "autograd", "sparse", "quantized"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFact:
    """A tensor that a node reads or returns.

    `source` is the node that made it and the place among that node's results; `root` names the memory it lies in, which
    views share, of `root_numel` elements. `is_stored` says that this is a parameter or buffer.
    """

    source: tuple[str, int]
    root: str
    root_numel: int
    numel: int
    dtype: str
    is_dense: bool
    requires_grad: bool
    is_stored: bool = False

    @property
    def is_floating(self) -> bool:
        """Return whether a policy may cast it."""
        return self.dtype in _CASTABLE


_CASTABLE = frozenset(str(dtype).removeprefix("torch.") for dtype in CASTABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFacts:
    """One node: `signature` is None where nothing is timed; `inputs` and `outputs` in the order of its arguments.

    An output that is one of the inputs, picked from a tuple say, has that one's source.
    """

    name: str
    signature: str | None
    inputs: tuple[TensorFact, ...]
    outputs: tuple[TensorFact, ...]


def is_timed(node: OpNode, n: fx.Node, arguments: Arguments) -> bool:
    """Return whether the call's time may depend on a format: it computes or moves dense real floating tensors.

    Not timed are calls with a float64 or complex or sparse tensor among theirs, which no policy casts, and code that
    torch functions do not show.
    """
    if n.op != "call_function" or node.kind != "op" or not node.op or lookup(node.op).family in _UNTIMED:
        return False
    tensors = list(tensors_in_tree(arguments))
    floats = [each for each in tensors if each.is_floating_point()]
    if not floats or any(each.dtype not in CASTABLE for each in floats):
        return False
    if any(each.is_complex() or each.layout != torch.strided for each in tensors):
        return False
    return any(meta.is_floating for meta in node.outputs) and getattr(n.target, "__module__", "") != "_operator"


class Reading(Replay):
    """One replay that collects the facts of every node."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.facts: list[CallFacts] = []
        self._graph = recording.op_graph
        self._made: dict[str, tuple[TensorFact, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Return what the node computes, and note its facts."""
        node = self._graph[n.name]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = list(tensors_in_tree((args, kwargs)))
        inputs = tuple(self._facts_in((n.args, n.kwargs)))
        timed = is_timed(node, n, (args, kwargs))
        signature = signature_of(n.target, (args, kwargs), grad=torch.is_grad_enabled()) if timed else None
        value = super().run_node(n)
        if len(inputs) != len(given):  # an argument that holds tensors where fx sees none
            inputs, signature = (), None
        outputs = tuple(self._outputs(node, value, given, inputs))
        self._made[n.name] = outputs
        self.facts.append(CallFacts(name=n.name, signature=signature, inputs=inputs, outputs=outputs))
        return value

    def _facts_in(self, value: Any) -> Iterator[TensorFact]:
        if isinstance(value, fx.Node):
            yield from self._made[value.name]
        elif isinstance(value, (tuple, list)):
            for part in value:
                yield from self._facts_in(part)
        elif isinstance(value, dict):
            for part in value.values():
                yield from self._facts_in(part)
        elif isinstance(value, slice):
            yield from self._facts_in((value.start, value.stop, value.step))

    def _outputs(
        self, node: OpNode, value: Any, given: list[torch.Tensor], inputs: tuple[TensorFact, ...]
    ) -> Iterator[TensorFact]:
        roots = {_memory(tensor): fact.root for tensor, fact in zip(given, inputs, strict=False)}
        for place, tensor in enumerate(tensors_in_tree(value)):
            same = next((fact for one, fact in zip(given, inputs, strict=False) if one is tensor), None)
            if same is not None:
                yield same
                continue
            root = roots.setdefault(_memory(tensor), f"{node.name}.{place}")
            yield TensorFact(
                source=(node.name, place),
                root=root,
                root_numel=_root_numel(tensor),
                numel=tensor.numel(),
                dtype=str(tensor.dtype).removeprefix("torch."),
                is_dense=is_dense(tensor),
                requires_grad=tensor.requires_grad,
                is_stored=node.kind in ("parameter", "buffer"),
            )


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _root_numel(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return tensor.numel()
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def facts_of(recording: Recording) -> tuple[CallFacts, ...]:
    """Return the facts of every node of a recorded step, in execution order. Costs one forward pass."""
    reading = Reading(recording)
    reading.loss()
    return tuple(reading.facts)
