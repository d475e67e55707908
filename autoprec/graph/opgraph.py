"""The op graph: what a recorded training step computes, as a networkx graph of plain values.

Nodes are keyed by the name of the `torch.fx` node they describe; the attribute `call` holds its `OpNode`.
An edge u -> v says that v reads a tensor that u produced, or memory that u wrote (edge attribute `memory=True`).
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import networkx as nx

from autoprec.graph.site import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """Shape, dtype (`float32`, `int64`: torch's name) and what autograd knows of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_floating(self) -> bool:
        """Return whether the dtype is a real floating-point one."""
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands, among the arguments of a call, for the value of the node called `name`."""

    name: str


NodeKind: TypeAlias = Literal["input", "parameter", "buffer", "constant", "op", "output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpNode:
    """One node of the graph.

    `site` is None unless `kind` is `op` and the op computes; `call` counts the calls of its module (0 for the first).
    `target` is the qualified name of a parameter, buffer or constant. `source` is `file:line` of the user's code.
    No policy casts a call that is `left_alone`, since it ran under `no_grad` inside a module that needs gradients or is
    opaque, nor one that `writes` to an argument, since it computes in that argument's dtype.
    `args` and `kwargs` are those of the op: nested tuples, dicts and slices of numbers, text (dtypes too), None and
    `Ref`s. Operands come in the order of the op, that of `1 - x` as (1, x). Opaque calls have none, as what they
    compute is not known.
    """

    name: str
    kind: NodeKind
    op: str = ""
    site: Site | None = None
    call: int = 0
    target: str = ""
    inputs: tuple[TensorMeta, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    constants: tuple[float, ...] = ()
    source: str = ""
    left_alone: bool = False
    writes: bool = False
    args: tuple[Any, ...] = field(default=(), hash=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def is_castable(self) -> bool:
        """Return whether a policy may cast the arguments of this call."""
        return not self.left_alone and not self.writes


@dataclass(frozen=True)
class OpGraph:
    """A directed acyclic graph of `OpNode`s, in execution order.

    `modules` maps every module path that ran to the name of its class.
    """

    digraph: "nx.DiGraph[str]"
    modules: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[OpNode]:
        """Return all nodes in execution order."""
        return iter(self._nodes.values())

    def __len__(self) -> int:
        """Return the number of nodes."""
        return int(self.digraph.number_of_nodes())

    def __getitem__(self, name: str) -> OpNode:
        """Return the node called `name`."""
        return self._nodes[name]

    def calls(self) -> Iterator[OpNode]:
        """Yield the op nodes that have a site, in execution order."""
        return (node for node in self if node.site is not None)

    def sites(self) -> tuple[Site, ...]:
        """Return every site once, in order of first execution."""
        return tuple(self._calls_by_site)

    def calls_of(self, site: Site) -> tuple[OpNode, ...]:
        """Return the nodes of `site`: one for each call of its module."""
        return self._calls_by_site.get(site, ())

    @cached_property
    def _nodes(self) -> Mapping[str, OpNode]:
        return {name: attributes["call"] for name, attributes in self.digraph.nodes.items()}

    @cached_property
    def _calls_by_site(self) -> Mapping[Site, tuple[OpNode, ...]]:
        found: dict[Site, list[OpNode]] = {}
        for node in self:
            if node.site is not None:
                found.setdefault(node.site, []).append(node)
        return {site: tuple(nodes) for site, nodes in found.items()}

    def fingerprint(self) -> str:
        """Return a hash of sites, edges, shapes and dtypes: equal for equal architectures, in every process."""
        digest = hashlib.sha256()
        number = {name: index for index, name in enumerate(self.digraph)}
        for node in self:
            fields = (node.kind, node.op, str(node.site), node.target, node.inputs, node.outputs)
            sources = sorted(number[source] for source in self.digraph.predecessors(node.name))
            digest.update(repr((fields, sources)).encode())
        return digest.hexdigest()[:16]
