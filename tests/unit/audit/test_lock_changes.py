"""Two locks: what changed, by name."""

from typing import Any

import pytest

from autoprec.audit.lock_changes import lock_changes

LOCK: dict[str, Any] = {
    "graph": "aa",
    "sites": {"blocks.{0-1}.mlp": "linear#0-1", "": "add#0"},
    "parameters": {"blocks.{0-1}.mlp.weight": "float32[4,4]"},
    "inputs": ["int64[8,64]"],
    "device": {"kind": "cpu", "name": "Testium"},
    "torch": "2.13.0+cpu",
    "autocast": {"lists": "x", "gone": [], "new": ["odd"]},
    "flags": {"cudnn.benchmark": False},
}


def told(**changed: Any) -> list[tuple[str, str, str]]:
    return [(c.aspect, c.where, c.what) for c in lock_changes(LOCK, {**LOCK, **changed})]


def test_nothing_changed() -> None:
    assert told() == []


def test_a_module_that_came_and_one_that_went() -> None:
    found = told(
        graph="bb",
        sites={"blocks.0.mlp": "linear#0-1", "": "add#0", "head": "linear#0"},
        parameters={"blocks.0.mlp.weight": "float32[4,4]", "head.weight": "float32[4,4]"},
    )
    gone = "is gone: blocks.1.mlp:linear#0, blocks.1.mlp:linear#1, blocks.1.mlp.weight"
    new = "is new, and the policy was not tuned for it: head:linear#0, head.weight"
    assert found == [("architecture", "blocks.1", gone), ("architecture", "head", new)]


def test_a_site_in_a_module_that_both_have() -> None:
    found = told(graph="bb", sites={"blocks.{0-1}.mlp": "linear#0-1", "": "add#0-1"})
    assert found == [("architecture", ":add#1", "is new, and the policy was not tuned for it")]


def test_a_long_list_is_cut() -> None:
    ((_, where, what),) = told(graph="bb", sites={**LOCK["sites"], "new": "linear#0-9"})
    assert where == "new"
    assert what.endswith("new:linear#3 and 6 more sites and parameters")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"parameters": {"blocks.0.mlp.weight": "float32[8,4]", "blocks.1.mlp.weight": "float32[4,4]"}},
            ("shapes", "blocks.0.mlp.weight", "was float32[4,4] and is float32[8,4]"),
        ),
        ({"inputs": ["int64[9,64]"]}, ("shapes", "batch, tensor 0", "was int64[8,64] and is int64[9,64]")),
        ({"inputs": []}, ("shapes", "batch", "had 1 tensors and has 0")),
        ({"device": {"kind": "cuda", "name": "H"}}, ("device", "device kind", "was cpu and is cuda")),
        ({"device": {"kind": "cpu", "name": "H"}}, ("device", "device name", "was Testium and is H")),
        ({"torch": "2.13.1"}, ("torch", "torch", "was 2.13.0+cpu and is 2.13.1")),
        ({"flags": {"cudnn.benchmark": True}}, ("flags", "torch flag cudnn.benchmark", "was False and is True")),
        (
            {"autocast": {"lists": "y", "gone": [], "new": ["odd"]}},
            ("autocast", "autocast lists", "their hash was x and is y"),
        ),
        (
            {"autocast": {"lists": "y", "gone": ["bmm"], "new": ["odd"]}},
            ("autocast", "bmm", "torch's autocast lists no longer have it, unlike when the policy was tuned"),
        ),
        (
            {"autocast": {"lists": "y", "gone": [], "new": []}},
            ("autocast", "odd", "torch's autocast treated it otherwise than now"),
        ),
    ],
)
def test_each_change_is_named(changed: dict[str, Any], expected: tuple[str, str, str]) -> None:
    assert told(**changed) == [expected]


def test_a_graph_that_is_wired_otherwise() -> None:
    ((aspect, where, what),) = told(graph="bb")
    assert (aspect, where) == ("architecture", "graph")
    assert "what reads what" in what


def test_the_build_of_torch_and_parts_that_do_not_count() -> None:
    assert told(torch="2.13.0+cu130") == []
    patch = {**LOCK, "torch": "2.13.1"}
    assert lock_changes(LOCK, patch, torch_parts=2) == ()
    assert lock_changes(LOCK, {**LOCK, "torch": "3.0.0"}, torch_parts=0) == ()
    assert lock_changes(LOCK, {**LOCK, "torch": "2.14.0"}, torch_parts=2) != ()


def test_a_policy_that_says_little_is_held_to_that_alone() -> None:
    assert lock_changes({}, LOCK) == ()
    ((change,)) = lock_changes({"graph": "bb"}, LOCK)
    assert change.what == "its hash was bb and is aa"
    assert lock_changes({"device": {"kind": "cpu"}}, LOCK) == ()
