"""From a format for every site to the fewest readable rules that say the same."""

from collections import Counter
from collections.abc import Mapping

from autoprec.graph.site import Site
from autoprec.policy import Rule
from autoprec.search.layout import Group, Layout

# Rules that keep sites in FP32 carry reasons, so they are preferred unless they are this many more.
_WORTH_OF_REASONS = 2


def rules_of(targets: Mapping[Site, str], layout: Layout, low: str, why: Mapping[Site, str]) -> tuple[Rule, ...]:
    """Return ordered rules, the last one for `*`, that give every site of `targets` its format, fp32 or `low`.

    Every rule wins somewhere. Either the FP32 sites are named and the rest runs low, or the low sites are named and
    the rest stays FP32, whichever takes clearly fewer rules. `why` gives the reason a site stays FP32.
    """
    fp32 = frozenset(site for site, target in targets.items() if target == "fp32")
    lowered = frozenset(targets) - fp32
    kept = [_kept_rule(group, why, fp32) for group in cover(fp32, layout.groups)] if lowered else []
    named = [Rule(sites=group.glob, format=low) for group in cover(lowered, layout.groups)]
    if lowered and len(kept) <= len(named) + _WORTH_OF_REASONS:
        return (*kept, Rule(sites="*", format=low))
    return (*named, Rule(sites="*", format="fp32"))


def cover(wanted: frozenset[Site], groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return few groups whose union is `wanted`, none of them redundant, in the order of `groups`.

    Greedy: the group that covers most of what is left comes first; of equals, the more general one.
    """
    usable = [group for group in groups if group.sites and group.sites <= wanted]
    chosen: list[Group] = []
    left = wanted
    while left:
        best = max(usable, key=lambda group: len(group.sites & left))
        chosen.append(best)
        left = left - best.sites
    for group in reversed(tuple(chosen)):
        others = frozenset[Site]().union(*(other.sites for other in chosen if other is not group))
        if group.sites <= others:
            chosen.remove(group)
    place = {group.glob: index for index, group in enumerate(groups)}
    return tuple(sorted(chosen, key=lambda group: place[group.glob]))


def _kept_rule(group: Group, why: Mapping[Site, str], covered: frozenset[Site]) -> Rule:
    """Return the rule that keeps a group in FP32, with its most common reason."""
    reasons = Counter(why[site] for site in sorted(group.sites & covered) if site in why)
    return Rule(sites=group.glob, format="fp32", why=reasons.most_common(1)[0][0] if reasons else "")
