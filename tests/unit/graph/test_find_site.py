import re

import pytest

from autoprec.errors import PolicyError
from autoprec.graph.find_site import the_site
from autoprec.graph.site import Site

SITES = [Site.parse(text) for text in (":add#0", "blocks.0:add#0", "blocks.0:add#1", "blocks.1:exp#0", "own:my_op#0")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (":add#0", ":add#0"),  # a site's own name, although as a pattern it would match no other
        ("blocks.0:add#1", "blocks.0:add#1"),
        ("blocks.1", "blocks.1:exp#0"),
        ("*:exp", "blocks.1:exp#0"),
        ("blocks.*:*#1", "blocks.0:add#1"),
        ("own:my_op#0", "own:my_op#0"),  # an op that the catalog lacks
    ],
)
def test_a_name_or_a_pattern_of_one_site_finds_it(text, found):
    assert str(the_site(SITES, text)) == found


def test_several_sites_are_named():
    with pytest.raises(PolicyError, match=r'"blocks\.\*" names 3 sites, and one is wanted: "blocks\.0:add#0", "blocks'):
        the_site(SITES, "blocks.*")
    with pytest.raises(PolicyError, match=r'"\*" names 5 sites.*"blocks\.1:exp#0" and 1 more$'):
        the_site(SITES, "*")


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("blocks.0:ad#0", '"blocks.0:add#0"'),
        ("block.1:exp#0", '"blocks.1:exp#0"'),
        ("own:myop#0", '"own:my_op#0"'),
        (":exp", '"blocks.1:exp#0"'),
        ("*:exq", '"blocks.1:exp#0"'),
        ("block.1", '"blocks.1:exp#0"'),
    ],
)
def test_a_wrong_name_names_the_nearest_sites(text, near):
    with pytest.raises(PolicyError, match=re.escape(f'"{text}" names no site of this workload; nearest: {near}')):
        the_site(SITES, text)


@pytest.mark.parametrize("text", ["zzz", "a:b:c"])
def test_a_name_unlike_any_site_shows_some(text):
    with pytest.raises(PolicyError, match=r'no site of this workload; sites: ":add#0", .* and 1 more; inspect --'):
        the_site(SITES, text)
