"""What differs between two policies: settings, rules, and on given sites the formats."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

from autoprec.graph.site import Site
from autoprec.policy.file import to_plain
from autoprec.policy.policy import Policy, Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingDifference:
    """A setting other than the rules with its two values, as the file has them."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleDifference:
    """A rule that only one policy has at this place of the order; `index` counts in that policy from 0."""

    side: str
    index: int
    rule: Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteDifference:
    """A site that runs in another format, and the rules that say so."""

    site: Site
    a: Rule
    b: Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDiff:
    """All differences between policy `a` and policy `b`; evidence and name are no differences of behavior."""

    settings: tuple[SettingDifference, ...]
    rules: tuple[RuleDifference, ...]
    sites: tuple[SiteDifference, ...]

    def __bool__(self) -> bool:
        """Return whether there is any difference."""
        return bool(self.settings or self.rules or self.sites)


def diff(a: Policy, b: Policy, sites: Iterable[Site] = ()) -> PolicyDiff:
    """Return what differs between two policies; the formats of `sites` are compared one by one."""
    return PolicyDiff(settings=_settings(a, b), rules=_rules(a, b), sites=_sites(a, b, sites))


def _settings(a: Policy, b: Policy) -> tuple[SettingDifference, ...]:
    plain_a, plain_b = to_plain(a), to_plain(b)
    names = [name for name in plain_a if name not in ("autoprec", "name", "rules", "evidence")]
    return tuple(
        SettingDifference(name=name, a=plain_a[name], b=plain_b[name])
        for name in names
        if plain_a[name] != plain_b[name]
    )


def _rules(a: Policy, b: Policy) -> tuple[RuleDifference, ...]:
    matcher = SequenceMatcher(None, _decisions(a), _decisions(b), autojunk=False)
    found: list[RuleDifference] = []
    for tag, start_a, end_a, start_b, end_b in matcher.get_opcodes():
        if tag != "equal":
            found += [RuleDifference(side="a", index=i, rule=a.rules[i]) for i in range(start_a, end_a)]
            found += [RuleDifference(side="b", index=i, rule=b.rules[i]) for i in range(start_b, end_b)]
    return tuple(found)


def _decisions(policy: Policy) -> list[tuple[str, str]]:
    return [(rule.sites, rule.format) for rule in policy.rules]


def _sites(a: Policy, b: Policy, sites: Iterable[Site]) -> tuple[SiteDifference, ...]:
    found = []
    for site in sites:
        (format_a, index_a), (format_b, index_b) = a.format_of(site), b.format_of(site)
        if format_a != format_b:
            found.append(SiteDifference(site=site, a=a.rules[index_a], b=b.rules[index_b]))
    return tuple(found)
