"""Differences between two policies."""

from dataclasses import replace

from autoprec.graph.site import Site
from autoprec.policy import Parameters, Policy, Rule, diff

SITES = (Site("a", "softmax", 0), Site("b", "add", 0))
A = Policy(name="a", rules=(Rule(sites="a", format="fp32"), Rule(sites="*", format="bf16")))


def test_equal_policies_do_not_differ_whatever_they_are_called() -> None:
    found = diff(
        A, replace(A, name="b", evidence={"speed": 2}, rules=(replace(A.rules[0], why="x"), A.rules[1])), SITES
    )
    assert not found
    assert found.settings == found.rules == found.sites == ()


def test_settings() -> None:
    found = diff(A, replace(A, parameters=Parameters(storage="bf16"), outputs="computed"))
    assert [(item.name, item.a, item.b) for item in found.settings] == [
        ("parameters", {"storage": "fp32"}, {"storage": "bf16"}),
        ("outputs", "fp32", "computed"),
    ]
    assert found


def test_layout() -> None:
    (found,) = diff(A, replace(A, memory_format="channels_last")).settings
    assert (found.name, found.a, found.b) == ("memory_format", "as_given", "channels_last")


def test_fused_optimizer() -> None:
    (found,) = diff(A, replace(A, optimizer="fused")).settings
    assert (found.name, found.a, found.b) == ("optimizer", "as_given", "fused")


def test_storage() -> None:
    low = Parameters(storage="bf16", master="fp32", keep=("*.bias",))
    (found,) = diff(A, replace(A, parameters=low)).settings
    assert (found.a, found.b) == ({"storage": "fp32"}, {"storage": "bf16", "master": "fp32", "keep": ["*.bias"]})


def test_rules_and_their_places() -> None:
    b = replace(A, rules=(Rule(sites="*:softmax", format="fp32"), *A.rules[:1], Rule(sites="*", format="fp16")))
    found = diff(A, b)
    assert [(item.side, item.index, item.rule.sites, item.rule.format) for item in found.rules] == [
        ("b", 0, "*:softmax", "fp32"),
        ("a", 1, "*", "bf16"),
        ("b", 2, "*", "fp16"),
    ]


def test_the_order_of_rules_is_a_difference() -> None:
    first, second = Rule(sites="a", format="fp32"), Rule(sites="*:softmax", format="fp16")
    found = diff(replace(A, rules=(first, second, A.rules[1])), replace(A, rules=(second, first, A.rules[1])), SITES)
    assert found.rules
    assert [(str(item.site), item.a.format, item.b.format) for item in found.sites] == [("a:softmax#0", "fp32", "fp16")]


def test_sites_differ_by_format_not_by_rule() -> None:
    b = replace(A, rules=(Rule(sites="a:softmax", format="fp32"), Rule(sites="*", format="fp16")))
    found = diff(A, b, SITES)
    assert [(str(item.site), item.a.sites, item.b.sites) for item in found.sites] == [("b:add#0", "*", "*")]
