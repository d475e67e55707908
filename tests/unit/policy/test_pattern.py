"""The site pattern: what it names, and what it refuses."""

import re

import pytest

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.policy import SitePattern, pattern_of

SOFTMAX = Site("blocks.3.attn", "softmax", 0)


@pytest.mark.parametrize(
    ("text", "site", "expected"),
    [
        ("*", SOFTMAX, True),
        ("*", Site("", "add", 0), True),
        ("*", Site("@loss", "cross_entropy", 0), True),
        ("blocks.*", SOFTMAX, True),
        ("blocks", SOFTMAX, False),
        ("*.attn", SOFTMAX, True),
        ("attn", SOFTMAX, False),
        ("blocks.?.attn", SOFTMAX, True),
        ("blocks.?.attn", Site("blocks.10.attn", "softmax", 0), False),
        ("blocks.3.attn:softmax", SOFTMAX, True),
        ("blocks.3.attn:softmax", Site("blocks.3.attn", "softmax", 7), True),
        ("blocks.3.attn:softmax#0", SOFTMAX, True),
        ("blocks.3.attn:softmax#0", Site("blocks.3.attn", "softmax", 10), False),
        ("blocks.3.attn:softmax#1*", Site("blocks.3.attn", "softmax", 10), True),
        ("blocks.3.attn:log_softmax", SOFTMAX, False),
        ("*:*softmax", SOFTMAX, True),
        ("*:softmax", SOFTMAX, True),
        ("*softmax", SOFTMAX, False),
        (":add", Site("", "add", 2), True),
        (":add", Site("head", "add", 2), False),
        (":add#0", Site("", "add", 0), True),
        ("", Site("", "add", 0), True),
        ("", Site("head", "add", 0), False),
        ("@loss", Site("@loss", "log", 0), True),
        ("a[0].b+c", Site("a[0].b+c", "add", 0), True),
        ("a[0]", Site("a0", "add", 0), False),
        ("a.b", Site("axb", "add", 0), False),
        ("ab?", Site("ab", "add", 0), False),
    ],
)
def test_what_a_pattern_names(text: str, site: Site, expected: bool) -> None:
    assert SitePattern(text).matches(site) is expected


def test_modules_are_matched_alone_too() -> None:
    assert SitePattern("blocks.*:softmax").matches_module("blocks.0")
    assert not SitePattern("blocks.*:softmax").matches_module("head")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("*", True), ("**", True), ("*:*", True), ("*:*#*", True), ("*:*#?", False), ("?*", False), ("*:add", False)],
)
def test_what_catches_all(text: str, expected: bool) -> None:
    assert SitePattern(text).catches_all is expected


def test_patterns_are_values() -> None:
    assert SitePattern("a:add") == SitePattern("a:add")
    assert hash(SitePattern("a:add")) == hash(SitePattern("a:add"))
    assert repr(SitePattern("a:add")) == "SitePattern(text='a:add')"


def test_stars_in_a_row_are_one_star() -> None:
    """As `.*.*.*`... this would take longer than anybody waits."""
    assert not SitePattern("*" * 60 + "z").matches(Site("a" * 60, "add", 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:add#0:b", '"a:add#0:b" is not a site pattern; a pattern reads module, module:op or module:op#index'),
        ("a:", '"a:" is not a site pattern'),
        ("a#0", '"a#0" is not a site pattern'),
        ("a:add#x", '"a:add#x" is not a site pattern'),
        ("a:sofmax", 'pattern "a:sofmax": op "sofmax" is not in the catalog; nearest: "softmax"'),
        ("a:qzqzqz", 'op "qzqzqz" is not in the catalog; nearest: none; an op of your own is named with a wildcard'),
        ("a:add_", 'pattern "a:add_": op "add_" is called "add" in a policy'),
        ("a:concat#0", 'op "concat" is called "cat" in a policy'),
        ("a:view", 'op "view" (movement) is never cast, so no site has it; name an op that computes'),
        ("a:gumbel_softmax", 'op "gumbel_softmax" is entered and has no site; name the ops inside it'),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        SitePattern(text)


def test_an_op_of_ones_own_is_named_with_a_wildcard() -> None:
    site = Site("mixer", "my_scan", 0)
    assert pattern_of(site) == "mixer:my_sca?#0"
    assert SitePattern(pattern_of(site)).matches(site)
    assert pattern_of(SOFTMAX) == "blocks.3.attn:softmax#0"
