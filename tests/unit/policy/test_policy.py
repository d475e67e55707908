"""The policy value: what it refuses, what wins, and that it stays as it was made."""

import copy
import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.policy import RULE_FORMATS, Float8, LossScale, Parameters, Policy, Rule

LAST = Rule(sites="*", format="bf16")


def _policy(**fields: Any) -> Policy:
    return Policy(**{"name": "p", "rules": (LAST,), **fields})


def test_the_first_rule_that_matches_wins() -> None:
    policy = _policy(
        rules=(
            Rule(sites="a:softmax", format="fp32"),
            Rule(sites="a", format="fp16"),
            Rule(sites="a:softmax", format="bf16"),
            Rule(sites="*", format="as_given"),
        )
    )
    assert policy.format_of(Site("a", "softmax", 0)) == ("fp32", 0)
    assert policy.format_of(Site("a", "add", 0)) == ("fp16", 1)
    assert policy.format_of(Site("b", "softmax", 0)) == ("as_given", 3)
    assert policy.format_of(Site("b", "softmax", 0)) == ("as_given", 3)
    assert policy.formats == ("fp32", "fp16", "bf16")


def test_rule_formats() -> None:
    assert RULE_FORMATS == ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp32_bf16", "fp32_ieee", "as_given", "promote")
    for name in RULE_FORMATS:
        assert Rule(sites="*:linear", format=name).format == name


@pytest.mark.parametrize("sites", ["*:linear", "a:mat?ul", "a.b:addmm#0", "*:mm"])
def test_fp8_rules_name_matrix_products(sites: str) -> None:
    assert Rule(sites=sites, format="fp8_e4m3").sites == sites


@pytest.mark.parametrize(
    ("sites", "other"),
    [("*", "matmul|bmm"), ("a.b", "bmm"), ("*:softmax", "softmax"), ("*:*mm", "bmm"), ("*:bmm", "bmm")],
)
def test_fp8_rules_that_name_more_are_refused(sites: str, other: str) -> None:
    module = re.escape(sites.partition(":")[0])
    message = (
        rf'is for linear, matmul, mm, addmm, and the rule names ({other}) too; name the op, as in "{module}:linear"'
    )
    with pytest.raises(PolicyError, match=message):
        Rule(sites=sites, format="fp8_e4m3")


def test_e5m2_is_for_gradients_alone() -> None:
    with pytest.raises(PolicyError, match=r'rule "a:linear": fp8_e5m2 is no format of a site.*write fp8_e4m3'):
        Rule(sites="a:linear", format="fp8_e5m2")


def test_formats_and_precisions_of_rules_that_compute_inside_fp32() -> None:
    policy = _policy(
        float32_matmul="bf16",
        rules=[
            Rule(sites="a", format="tf32"),
            Rule(sites="b", format="fp32_bf16"),
            Rule(sites="c", format="fp32_ieee"),
            LAST,
        ],
    )
    assert policy.formats == ("tf32", "fp32", "bf16")
    assert policy.matmul_precisions == ("bf16", "tf32", "ieee")
    assert _policy().matmul_precisions == ("ieee",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule(sites="*", format="bf61"), 'rule "*": "bf61" is not a format; formats: fp32, tf32'),
        (lambda: Rule(sites="*", format="bf61"), "or fp32_bf16, fp32_ieee, as_given, promote"),
        (lambda: Rule(sites="a:sofmax", format="bf16"), 'op "sofmax" is not in the catalog; nearest: "softmax"'),
        (lambda: Rule(sites=3, format="bf16"), "rule field sites is 3; allowed: text"),  # type: ignore[arg-type]
        (lambda: Rule(sites="*", format=None), "rule field format is None; allowed: text"),  # type: ignore[arg-type]
        (lambda: Rule(sites="*", format="bf16", why=1), "rule field why is 1; allowed: text"),  # type: ignore[arg-type]
        (lambda: _policy(rules=()), 'policy "p": it has no rules; the last rule must catch every site: add {sites:'),
        (lambda: _policy(rules=(LAST, Rule(sites="a", format="fp32"))), 'its last rule is "a"; the last rule must'),
        (lambda: _policy(name=None), "name is None; allowed: text"),
        (lambda: _policy(device={"knd": "cpu"}), "device key is 'knd'; allowed: kind, name"),
        (lambda: _policy(device={"kind": 1}), "device.kind is 1; allowed: text"),
        (lambda: _policy(float32_matmul="fp16"), "float32_matmul is 'fp16'; allowed: ieee, tf32, bf16"),
        (lambda: Float8(scaling="rows"), "float8.scaling is 'rows'; allowed: tensorwise, rowwise"),  # type: ignore[arg-type]
        (lambda: _policy(outputs="bf16"), "outputs is 'bf16'; allowed: fp32, computed"),
        (lambda: _policy(evidence={"a": [1, {2}]}), "evidence.a[1] is {2}; allowed: text, numbers, booleans, None"),
        (lambda: _policy(evidence={1: 2}), "a key of evidence is 1; allowed: text"),
        (lambda: Parameters(storage="fp8"), "parameters.storage is 'fp8'; allowed: fp32, bf16, fp16"),  # type: ignore[arg-type]
        (lambda: LossScale(kind="auto"), "loss_scale.kind is 'auto'; allowed: none, static, dynamic"),  # type: ignore[arg-type]
        (lambda: LossScale(initial=math.inf), "loss_scale.initial is inf; allowed: finite numbers"),
        (lambda: LossScale(minimum=True), "loss_scale.minimum is True; allowed: finite numbers"),
        (lambda: LossScale(initial="8"), "loss_scale.initial is '8'; allowed: finite numbers"),  # type: ignore[arg-type]
        (lambda: LossScale(growth_interval=0), "loss_scale.growth_interval is 0; allowed: whole numbers from 1"),
        (lambda: LossScale(growth_interval=2.0), "loss_scale.growth_interval is 2.0; allowed: whole"),  # type: ignore[arg-type]
        (lambda: LossScale(growth_factor=1.0), "loss_scale.growth_factor is 1; allowed: numbers above 1"),
        (lambda: LossScale(backoff_factor=1.0), "loss_scale.backoff_factor is 1; allowed: numbers between 0 and 1"),
        (lambda: LossScale(backoff_factor=0.0), "loss_scale.backoff_factor is 0; allowed: numbers between 0 and 1"),
        (lambda: LossScale(minimum=0.0), "loss_scale.minimum is 0; allowed: positive numbers"),
        (lambda: LossScale(initial=0.5), "loss_scale.initial is 0.5; allowed: minimum (1) to maximum (1.67772e+07)"),
        (lambda: LossScale(maximum=2.0), "loss_scale.initial is 65536; allowed: minimum (1) to maximum (2)"),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        make()


def test_whole_numbers_are_floats_in_a_loss_scale() -> None:
    scale = LossScale(kind="static", initial=8)
    assert type(scale.initial) is float
    assert scale == LossScale(kind="static", initial=8.0)


def test_containers_are_frozen_and_no_longer_the_callers() -> None:
    evidence = {"seeds": [1, 2], "speed": {"median": 1.5}}
    device = {"kind": "cpu"}
    policy = _policy(evidence=evidence, device=device, rules=[LAST])
    evidence["seeds"].append(3)  # type: ignore[attr-defined]
    device["kind"] = "cuda"
    assert policy.evidence["seeds"] == (1, 2)
    assert dict(policy.device) == {"kind": "cpu"}
    assert policy.rules == (LAST,)
    with pytest.raises(TypeError):
        policy.evidence["speed"]["median"] = 2.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "other"  # type: ignore[misc]


def test_copies_are_equal_and_decide_alike() -> None:
    policy = _policy(evidence={"a": [1, {"b": None}]}, device={"kind": "cpu"})
    policy.format_of(Site("a", "add", 0))
    for again in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert again == policy
        assert again.format_of(Site("a", "add", 0)) == ("bf16", 0)
    assert dataclasses.replace(policy, rules=(Rule(sites="*", format="fp32"),)).format_of(Site("a", "add", 0)) == (
        "fp32",
        0,
    )


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("rules", Rule(sites="*", format="bf16"), r"a tuple of autoprec\.Rule"),
        ("rules", [("*", "bf16")], r"rules\[0\] is \('\*', 'bf16'\); allowed: an autoprec\.Rule"),
        ("parameters", {"storage": "bf16"}, r"an autoprec\.Parameters"),
        ("float8", "rowwise", r"float8 is 'rowwise'; allowed: an autoprec\.Float8"),
        ("loss_scale", "dynamic", r"loss_scale is 'dynamic'; allowed: an autoprec\.LossScale"),
        ("fallback", "fp32", r"an autoprec\.Rule"),
    ],
)
def test_a_field_of_another_kind_is_refused_where_it_is_written(field: str, value: object, allowed: str) -> None:
    given = {"name": "p", "rules": (Rule(sites="*", format="fp32"),), field: value}
    with pytest.raises(PolicyError, match=allowed):
        Policy(**given)
