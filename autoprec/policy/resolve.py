"""A policy resolved on the sites of one model: who wins where, which rules win nowhere and what they meant."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.ops import CATALOG, canonical_name
from autoprec.policy.pattern import SitePattern
from autoprec.policy.policy import Policy, Rule


@dataclass(frozen=True, kw_only=True)
class ResolvedPolicy:
    """A format and a winning rule for every site of one model.

    `winners` maps each site to the index of its rule, in the order the sites were given.
    """

    policy: Policy
    winners: Mapping[Site, int]

    def format(self, site: Site) -> str:
        """Return the format that `site` runs in."""
        return self.rule(site).format

    def rule(self, site: Site) -> Rule:
        """Return the rule that won at `site`."""
        return self.policy.rules[self.winners[site]]

    @property
    def formats(self) -> Mapping[Site, str]:
        """Return the format of every site."""
        return MappingProxyType({site: self.policy.rules[index].format for site, index in self.winners.items()})

    @property
    def sites_of_rule(self) -> tuple[tuple[Site, ...], ...]:
        """Return, for each rule, the sites it won."""
        won: list[list[Site]] = [[] for _ in self.policy.rules]
        for site, index in self.winners.items():
            won[index].append(site)
        return tuple(tuple(sites) for sites in won)

    @property
    def dead_rules(self) -> tuple[int, ...]:
        """Return the indices of rules that win nowhere; the last one, which catches the rest, is never dead."""
        alive = set(self.winners.values())
        return tuple(index for index in range(len(self.policy.rules) - 1) if index not in alive)

    def explain_dead(self, index: int) -> str:
        """Return why the rule with that index wins nowhere: who takes its sites, or which sites were meant."""
        text = self.policy.rules[index].sites
        pattern = SitePattern(text)
        takers = Counter(winner for site, winner in self.winners.items() if pattern.matches(site))
        if takers:
            taken = ", ".join(
                f'rule {winner + 1} "{self.policy.rules[winner].sites}" ({_sites(count)})'
                for winner, count in sorted(takers.items())
            )
            return f'rule {index + 1} "{text}" wins no site: earlier rules take them: {taken}; move it up or delete it'
        near = ", ".join(f'"{glob}" ({_sites(count)})' for glob, count in nearest_patterns(text, self.winners))
        hint = hint_of_op(text)
        nearest = f"; nearest: {near or 'none'}" if near or not hint else ""
        return f'rule {index + 1} "{text}" matches no site{nearest}{hint}'

    def check_alive(self, file: str | None = None, lines: Sequence[int] = ()) -> None:
        """Raise `PolicyError` if a rule wins nowhere, naming it and the nearest sites, and its line in `file`."""
        if self.dead_rules:
            places = {index: f"{file}:{lines[index]}: " if file else "" for index in self.dead_rules}
            reasons = "\n".join(places[index] + self.explain_dead(index) for index in self.dead_rules)
            raise PolicyError(reasons if file else f'policy "{self.policy.name}": {reasons}')

    def without_dead_rules(self) -> Policy:
        """Return the same policy for these sites with only the rules that win somewhere, and the last one."""
        dead = set(self.dead_rules)
        return replace(self.policy, rules=tuple(rule for i, rule in enumerate(self.policy.rules) if i not in dead))


def resolve(policy: Policy, sites: Iterable[Site]) -> ResolvedPolicy:
    """Return the winning rule of every site."""
    winners = {site: policy.format_of(site)[1] for site in sites}
    return ResolvedPolicy(policy=policy, winners=MappingProxyType(winners))


def hint_of_op(text: str) -> str:
    """Return what to write for a pattern that is the name of an op and stands where a module is looked for."""
    op = canonical_name(text)
    return f'; to name the op write "*:{op}"' if op in CATALOG and CATALOG[op].is_site else ""


def nearest_patterns(text: str, sites: Iterable[Site], n: int = 3) -> tuple[tuple[str, int], ...]:
    """Return up to `n` patterns that match sites and read most like `text`, each with the number of its sites.

    Layers that differ only in their number are one pattern: `blocks.*.attn`.
    """
    detail = (":" in text) + ("#" in text)
    sites = tuple(sites)
    patterns = dict.fromkeys((_numbers_folded(site.module), *_op_parts(site)[:detail]) for site in sites)
    texts = {"".join(parts): parts for parts in patterns}
    close = difflib.get_close_matches(text, texts, n=n, cutoff=0.4)
    return tuple((glob, sum(_is_like(site, texts[glob]) for site in sites)) for glob in close)


def _numbers_folded(module: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _op_parts(site: Site) -> tuple[str, str]:
    return f":{site.op}", f"#{site.index}"


def _is_like(site: Site, parts: tuple[str, ...]) -> bool:
    module, *rest = parts
    return SitePattern(module).matches_module(site.module) and tuple(rest) == _op_parts(site)[: len(rest)]


def _sites(count: int) -> str:
    return f"{count} site" if count == 1 else f"{count} sites"
