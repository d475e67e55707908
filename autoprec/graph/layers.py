"""Layers: the sites that belong together and take one choice."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeAlias

from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site

_Parts: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The sites that one module calls itself.

    `name` is the module's path, empty for the root module and `@loss` for loss code outside the model.
    `pattern` is `name` with a star for every number that only counts modules of one class: layers that repeat
    (`blocks.0.attention`, `blocks.1.attention`) share it, the steps of an `nn.Sequential` (a linear, a GELU) do not.
    It is a label for a group of layers. As the module part of a rule it also matches modules further inside.
    """

    name: str
    pattern: str
    sites: tuple[Site, ...]


def layers_of(op_graph: OpGraph) -> tuple[Layer, ...]:
    """Return the layers of `op_graph` in order of first execution, each with its sites in that order."""
    sites: defaultdict[str, list[Site]] = defaultdict(list)
    for site in op_graph.sites():
        sites[site.module].append(site)
    classes = {**dict.fromkeys(sites, ""), **op_graph.modules}
    patterns = _patterns(classes)
    return tuple(Layer(name=name, pattern=patterns[name], sites=tuple(own)) for name, own in sites.items())


def _patterns(classes: dict[str, str]) -> dict[str, str]:
    """Return the pattern of every module path, given its class.

    The numbers of a path are taken from left to right. One becomes a star if at least two modules differ in nothing
    else, given the stars so far, and all of them have the same class.
    """
    patterns: dict[str, _Parts] = {name: tuple(name.split(".")) for name in classes}
    depth = max((len(parts) for parts in patterns.values()), default=0)
    for position in range(depth):
        groups: defaultdict[_Parts, list[str]] = defaultdict(list)
        for name, parts in patterns.items():
            if position < len(parts) and parts[position].isdigit():
                groups[(*parts[:position], "*", *parts[position + 1 :])].append(name)
        for starred, members in groups.items():
            if len(members) > 1 and len({classes[name] for name in members}) == 1:
                patterns.update(dict.fromkeys(members, starred))
    return {name: ".".join(parts) for name, parts in patterns.items()}
