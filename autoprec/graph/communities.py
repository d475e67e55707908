"""Sites in groups that exchange more with each other than with the rest, for where no module hierarchy tells them.

Source: Blondel et al. 2008, Fast unfolding of communities in large networks, J. Stat. Mech. P10008 (Louvain's method),
as networkx has it.
"""

from collections.abc import Collection, Sequence

import networkx as nx

from autoprec.graph.layers import Layer
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site


def communities(op_graph: OpGraph, sites: Collection[Site], most: int) -> tuple[tuple[Site, ...], ...]:
    """Return `sites` in groups of up to `most`, in order of first execution, equal for equal graphs.

    Two sites are near if one reads what the other made, views and other calls without a site in between. A group in
    which Louvain's method finds no parts is cut into runs of `most` sites.
    """
    order = [site for site in op_graph.sites() if site in set(sites)]
    graph = _neighbors(op_graph, order)
    waiting, done = [list(range(len(order)))], []
    while waiting:
        group = waiting.pop()
        if len(group) <= most:
            done.append(group)
            continue
        parts = [sorted(part) for part in nx.community.louvain_communities(graph.subgraph(group), seed=0)]
        if len(parts) == 1:
            parts = [group[start : start + most] for start in range(0, len(group), most)]
        waiting.extend(parts)
    return tuple(tuple(order[index] for index in group) for group in sorted(done) if group)


def parts_of(op_graph: OpGraph, layers: Sequence[Layer], sites: Collection[Site], most: int) -> dict[Site, int]:
    """Return the part of its layer that each site belongs to, for layers with more than `most` of `sites` alone.

    Layers that repeat are parted alike: as the first of them, by op and ordinal; what that one lacks is in its part 0.
    """
    wanted, found = set(sites), dict[Site, int]()
    by_pattern: dict[str, dict[tuple[str, int], int]] = {}
    for layer in layers:
        own = [site for site in layer.sites if site in wanted]
        if layer.pattern not in by_pattern:
            groups = communities(op_graph, own, most) if len(own) > most else ()
            by_pattern[layer.pattern] = {(s.op, s.index): part for part, group in enumerate(groups) for s in group}
        parts = by_pattern[layer.pattern]
        found |= {site: parts.get((site.op, site.index), 0) for site in own if parts}
    return found


def _neighbors(op_graph: OpGraph, order: list[Site]) -> "nx.Graph[int]":
    """Return which sites, by their place in `order`, exchange results, and how often."""
    place = {site: index for index, site in enumerate(order)}
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(order)))
    made_by: dict[str, frozenset[int]] = {}  # of each node, the sites that its numbers come from
    for node in op_graph:
        sources = frozenset[int]().union(*(made_by.get(each, ()) for each in op_graph.digraph.predecessors(node.name)))
        own = None if node.site is None else place.get(node.site)
        if own is None:
            made_by[node.name] = sources if node.site is None else frozenset()
            continue
        made_by[node.name] = frozenset({own})
        for source in sorted(sources - {own}):
            weight = graph.edges[source, own]["weight"] + 1 if graph.has_edge(source, own) else 1
            graph.add_edge(source, own, weight=weight)
    return graph
