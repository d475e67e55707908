"""Resolving on the sites of a model: winners, dead rules and the nearest sites."""

import re

import pytest

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.policy import Policy, Rule, nearest_patterns, resolve

SITES = (
    *(Site(f"encoder.{i}.attn", op, 0) for i in range(12) for op in ("matmul", "softmax")),
    Site("head", "linear", 0),
    Site("@loss", "cross_entropy", 0),
)


def _policy(*sites: str) -> Policy:
    return Policy(
        name="p", rules=(*(Rule(sites=text, format="fp32") for text in sites), Rule(sites="*", format="bf16"))
    )


def test_winners() -> None:
    resolved = resolve(_policy("*:softmax", "encoder.*"), SITES)
    assert tuple(resolved.winners) == SITES
    assert resolved.format(Site("head", "linear", 0)) == "bf16"
    assert resolved.rule(Site("encoder.3.attn", "softmax", 0)).sites == "*:softmax"
    assert resolved.formats[Site("encoder.3.attn", "matmul", 0)] == "fp32"
    assert [len(sites) for sites in resolved.sites_of_rule] == [12, 12, 2]
    assert resolved.dead_rules == ()
    resolved.check_alive()


def test_a_rule_that_matches_nothing_names_the_nearest_sites() -> None:
    resolved = resolve(_policy("enc.*.attn"), SITES)
    assert resolved.dead_rules == (0,)
    with pytest.raises(
        PolicyError,
        match=re.escape('policy "p": rule 1 "enc.*.attn" matches no site; nearest: "encoder.*.attn" (24 sites)'),
    ):
        resolved.check_alive()


def test_a_rule_that_comes_too_late_names_the_rules_that_take_its_sites() -> None:
    resolved = resolve(_policy("encoder.0.*:softmax", "encoder.*", "encoder.*.attn:softmax"), SITES)
    assert resolved.dead_rules == (2,)
    assert resolved.explain_dead(2) == (
        'rule 3 "encoder.*.attn:softmax" wins no site: earlier rules take them: rule 1 "encoder.0.*:softmax" (1 site), '
        'rule 2 "encoder.*" (11 sites); move it up or delete it'
    )


def test_all_dead_rules_are_named_at_once() -> None:
    with pytest.raises(PolicyError, match=r"rule 1 .*\n.*rule 2 "):
        resolve(_policy("zzz", "qqq"), SITES).check_alive()


def test_nothing_near_is_said() -> None:
    assert resolve(_policy("zzzzzzzz"), SITES).explain_dead(0) == 'rule 1 "zzzzzzzz" matches no site; nearest: none'


def test_the_last_rule_may_win_nowhere() -> None:
    resolved = resolve(_policy("*"), SITES)
    assert resolved.dead_rules == ()
    assert resolve(_policy(), ()).dead_rules == ()


def test_dead_rules_can_be_dropped() -> None:
    policy = resolve(_policy("*:conv2d", "*:softmax", "encoder.3.attn:softmax"), SITES).without_dead_rules()
    assert [rule.sites for rule in policy.rules] == ["*:softmax", "*"]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("encodr.0.attn", ("encoder.*.attn", 24)),
        ("heads", ("head", 1)),
        ("encoder.*.atn:softmax", ("encoder.*.attn:softmax", 12)),
        ("encoder.*.attn:softmax#1", ("encoder.*.attn:softmax#0", 12)),
        ("@los:cross_entropy", ("@loss:cross_entropy", 1)),
    ],
)
def test_nearest_patterns_are_as_detailed_as_the_text(text: str, nearest: tuple[str, int]) -> None:
    assert nearest_patterns(text, SITES)[0] == nearest


def test_a_dead_rule_is_named_with_its_line_and_the_op_it_meant() -> None:
    resolved = resolve(_policy("softmax"), SITES)
    with pytest.raises(PolicyError, match=r'^p\.yaml:7: rule 1 "softmax" matches no site; .*write "\*:softmax"$'):
        resolved.check_alive("p.yaml", (7, 8))
