"""The layout: the sites of a workload as the search sees them, grouped by layer, op and family, with their marks."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoprec.analysis import VERDICTS, Mark, ReasonCode
from autoprec.analysis.classes import numerics_classes
from autoprec.graph.communities import parts_of
from autoprec.graph.layers import Layer
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from autoprec.ops import lookup
from autoprec.policy import SitePattern, pattern_of
from autoprec.search.space import Space

_LARGEST_LAYER = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All sites that one glob matches."""

    glob: str
    sites: frozenset[Site]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sites that may run low and what is known of them.

    `layer` maps a site to the key of the layer choice it follows. `marks` are by (site, format). `searched` are the
    sites that default to FP32 and that the space allows to lower. `origin` maps a site that defaults to FP32 because
    it reads such a result to the site that made it. `groups` are globs that rules may use, general ones first.
    `fronts` holds for each low format the sites that run low in each plan of its front, the fastest first, and `beyond`
    those of the plans that lower marked sites too, the most exact first.
    """

    layer: Mapping[Site, str]
    marks: Mapping[tuple[Site, str], Mark]
    searched: frozenset[Site]
    origin: Mapping[Site, Site]
    groups: tuple[Group, ...]
    fronts: Mapping[str, tuple[frozenset[Site], ...]] = field(default_factory=dict)
    beyond: Mapping[str, tuple[frozenset[Site], ...]] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the sites in order of first execution."""
        return tuple(self.layer)

    def verdict(self, site: Site, low: str) -> str:
        """Return the verdict on `site` in the format `low`; a site without a mark is free."""
        mark = self.marks.get((site, low))
        return "free" if mark is None else mark.verdict

    def detail(self, site: Site, low: str) -> str:
        """Return why `site` should not run in `low`."""
        mark = self.marks.get((site, low))
        return mark.reasons[0].detail if mark is not None and mark.reasons else f"{site.op} is fp32 by default"


def layout_of(
    marks: Iterable[Mark],
    layers: Sequence[Layer],
    space: Space,
    lowerable: Collection[Site] | None = None,
    op_graph: OpGraph | None = None,
) -> Layout:
    """Return the layout of the `lowerable` sites (None: all that are marked) under the grouping of `space`.

    With the `op_graph`, a layer of too many sites to take one choice, such as a model without submodules, is parted
    by who exchanges results with whom.
    """
    strongest: dict[tuple[Site, str], Mark] = {}
    for mark in marks:
        known = strongest.get((mark.site, mark.format))
        if known is None or VERDICTS.index(mark.verdict) > VERDICTS.index(known.verdict):
            strongest[mark.site, mark.format] = mark
    movable = {site for site, _ in strongest} if lowerable is None else set(lowerable)
    layer_key = {
        site: layer.pattern if space.grouping == "pattern" else layer.name
        for layer in layers
        for site in layer.sites
        if site in movable
    }
    parts = {} if op_graph is None else parts_of(op_graph, layers, tuple(layer_key), _LARGEST_LAYER)
    layer_key = {site: f"{key}[{parts[site]}]" if site in parts else key for site, key in layer_key.items()}
    globs = [SitePattern(glob) for glob in space.prefer]
    own = [layer for layer in layers if movable.intersection(layer.sites)]
    return Layout(
        layer=layer_key,
        marks=strongest,
        searched=frozenset(site for site in layer_key if any(glob.matches(site) for glob in globs)),
        origin=_origins(strongest.values()),
        groups=_groups(own, tuple(layer_key)),
    )


def lowerable_sites(op_graph: OpGraph) -> frozenset[Site]:
    """Return the sites that compute floating-point values and that a policy may cast."""
    classed = numerics_classes(op_graph)
    return frozenset(
        node.site for node in op_graph.calls() if node.site is not None and node.is_castable and node.name in classed
    )


def _origins(marks: Iterable[Mark]) -> dict[Site, Site]:
    """Return where the default of each contaminated site comes from."""
    return {
        mark.site: Site.parse(str(reason.evidence["origin"]))
        for mark in marks
        for reason in mark.reasons[:1]
        if reason.code == ReasonCode.CONTAMINATED and ":" in str(reason.evidence["origin"])
    }


def family_of(site: Site) -> str:
    """Return the family of the site's op."""
    return str(lookup(site.op).family)


def _groups(layers: Sequence[Layer], sites: tuple[Site, ...]) -> tuple[Group, ...]:
    """Return the globs worth writing into a rule: an op anywhere, a layer, an op in a layer, one site."""
    by_op: defaultdict[str, set[Site]] = defaultdict(set)
    by_module: defaultdict[str, dict[str, set[Site]]] = defaultdict(lambda: defaultdict(set))
    for site in sites:
        by_op[_op_glob(site)].add(site)
        by_module[site.module][_op_glob(site)].add(site)
    starred = dict.fromkeys([*(layer.pattern for layer in layers), *(_counted(layer) for layer in layers)])
    modules = {glob: [name for name in by_module if SitePattern(glob).matches_module(name)] for glob in starred}
    modules |= {layer.name: [layer.name] for layer in layers}
    inside: dict[str, dict[str, set[Site]]] = {}
    for glob, names in modules.items():
        ops = dict.fromkeys(op for name in names for op in by_module[name])
        inside[glob] = {op: set().union(*(by_module[name].get(op, ()) for name in names)) for op in ops}
    found = {f"*:{op}": own for op, own in by_op.items()}
    found |= {f"{glob}:*": set().union(*ops.values()) for glob, ops in inside.items()}
    found |= {f"{glob}:{op}": own for glob, ops in inside.items() for op, own in ops.items()}
    found |= {pattern_of(site): {site} for site in sites}
    return tuple(Group(glob=glob, sites=frozenset(own)) for glob, own in found.items())


def _op_glob(site: Site) -> str:
    """Return the op as a rule may name it; one that the catalog lacks needs a wildcard."""
    return pattern_of(site).rpartition(":")[2].partition("#")[0]


def _counted(layer: Layer) -> str:
    """Return the layer's pattern with `?` for every digit of its numbers: it matches no module further inside."""
    pattern, name = layer.pattern.split("."), layer.name.split(".")
    return ".".join("?" * len(number) if part == "*" else part for part, number in zip(pattern, name, strict=True))
