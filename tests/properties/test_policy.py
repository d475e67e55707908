"""Policies of every shape: file and back, first match wins, and one matcher that agrees with its definition."""

import copy
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoprec.errors import PolicyFileError
from autoprec.graph.site import Site
from autoprec.ops import CATALOG, FLOAT8_OPS
from autoprec.policy import (
    FLOAT8,
    RULE_FORMATS,
    Float8,
    LossScale,
    Parameters,
    Policy,
    Rule,
    SitePattern,
    diff,
    dump_policy,
    load_policy,
    pattern_of,
    preset,
    preset_names,
    resolve,
    save_policy,
)

OPS = ("softmax", "add", "matmul", "layer_norm", "my_own_op")
WORDS = st.text(alphabet="ab0.", max_size=5)
GLOBS = st.text(alphabet="ab0.*?", max_size=6)

sites = st.builds(Site, WORDS, st.sampled_from(OPS), st.integers(0, 12))

op_globs = st.one_of(
    st.sampled_from([op for op in OPS if op in CATALOG]),
    st.text(alphabet="adsoftmx_*?", min_size=1, max_size=6).filter(lambda text: set(text) & set("*?")),
)
index_globs = st.text(alphabet="0123*?", min_size=1, max_size=3)
patterns = st.one_of(
    GLOBS,
    st.builds("{}:{}".format, GLOBS, op_globs),
    st.builds("{}:{}#{}".format, GLOBS, op_globs, index_globs),
)
texts = st.text(max_size=12)
formats = st.sampled_from([name for name in RULE_FORMATS if name != FLOAT8])
float8_patterns = st.builds("{}:{}".format, GLOBS, st.sampled_from(FLOAT8_OPS))
rules = st.one_of(
    st.builds(Rule, sites=patterns, format=formats, why=texts),
    st.builds(Rule, sites=float8_patterns, format=st.just(FLOAT8), why=texts),
)
finite = {"allow_nan": False, "allow_infinity": False}
loss_scales = st.builds(
    lambda low, high, **rest: LossScale(minimum=min(low, high), maximum=max(low, high), initial=low, **rest),
    low=st.floats(1e-30, 1e30),
    high=st.floats(1e-30, 1e30),
    kind=st.sampled_from(["none", "static", "dynamic"]),
    growth_interval=st.integers(1, 10**6),
    growth_factor=st.floats(1.0, 1e6, exclude_min=True),
    backoff_factor=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
evidence_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
name_globs = st.text(min_size=1, max_size=6).filter(lambda text: not set(text) & set(":#"))
keeps = st.lists(st.sampled_from(["*norm*", "*.bias", "embed*", "8bit", "null"]) | name_globs, max_size=3)
states = st.sampled_from(["fp32", "bf16", "8bit"])
parameters = st.one_of(
    st.builds(Parameters, optimizer_state=states),
    st.builds(
        Parameters,
        storage=st.sampled_from(["bf16", "fp16"]),
        keep=keeps,
        batch_norm=st.sampled_from(["storage", "fp32"]),
        optimizer_state=states,
    ),
    st.builds(
        lambda stochastic, fp16, **rest: (
            Parameters(storage="bf16", rounding="stochastic", **rest)
            if stochastic
            else Parameters(storage="fp16" if fp16 else "bf16", master="fp32", **rest)
        ),
        stochastic=st.booleans(),
        fp16=st.booleans(),
        gradients=st.sampled_from(["fp32", "storage"]),
        keep=keeps,
        optimizer_state=states,
    ),
)
policies = st.builds(
    Policy,
    name=texts,
    rules=st.builds(
        lambda first, last: (*first, last),
        st.lists(rules, max_size=4),
        st.builds(Rule, sites=st.just("*"), format=formats, why=texts),
    ),
    device=st.dictionaries(st.sampled_from(["kind", "name"]), texts),
    parameters=parameters,
    float32_matmul=st.sampled_from(["ieee", "tf32", "bf16"]),
    float8=st.builds(Float8, scaling=st.sampled_from(["tensorwise", "rowwise"])),
    loss_scale=st.one_of(st.just(LossScale()), loss_scales),
    memory_format=st.sampled_from(["as_given", "channels_last"]),
    optimizer=st.just("as_given"),
    compile=st.sampled_from(["as_given", "inductor"]),
    outputs=st.sampled_from(["fp32", "computed"]),
    fallback=rules,
    evidence=st.dictionaries(texts, evidence_values, max_size=4),
)


policies = st.one_of(
    policies,
    st.builds(
        lambda policy, parameters: replace(policy, parameters=parameters, optimizer="fused"),
        policies,
        parameters.filter(lambda found: found.optimizer_state == "fp32"),
    ),
)


def _through_a_file(text: str) -> Policy:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.yaml")
        path.write_text(text, encoding="utf-8")
        return load_policy(path)


def _typed(value: Any) -> Any:
    """Return `value` so that 1, 1.0 and True differ."""
    if isinstance(value, Mapping):
        return {key: _typed(item) for key, item in value.items()}
    return [_typed(item) for item in value] if isinstance(value, tuple) else (type(value).__name__, value)


@given(policies)
def test_policy_to_file_to_policy_is_the_identity(policy: Policy) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.yaml")
        save_policy(policy, path)
        back = load_policy(path)
        assert path.read_text(encoding="utf-8") == dump_policy(policy) == dump_policy(back)
        assert [item.name for item in Path(folder).iterdir()] == ["policy.yaml"]
    assert back == policy
    assert _typed(back.evidence) == _typed(policy.evidence)


@given(policies, st.randoms(use_true_random=False))
def test_the_same_policy_has_the_same_bytes(policy: Policy, random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return [shuffled(item) for item in value] if isinstance(value, tuple) else value
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffled(value[key]) for key in keys}

    again = Policy(
        name=policy.name,
        rules=policy.rules,
        device=shuffled(policy.device),
        parameters=policy.parameters,
        float32_matmul=policy.float32_matmul,
        float8=policy.float8,
        loss_scale=policy.loss_scale,
        memory_format=policy.memory_format,
        optimizer=policy.optimizer,
        compile=policy.compile,
        outputs=policy.outputs,
        fallback=policy.fallback,
        evidence=shuffled(policy.evidence),
    )
    assert again == policy
    assert dump_policy(again) == dump_policy(policy)
    assert not diff(again, policy)


@given(policies)
def test_a_policy_can_be_copied_and_pickled(policy: Policy) -> None:
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


@given(policies, st.data())
def test_a_damaged_file_is_refused_with_its_name_or_still_a_policy(policy: Policy, data: st.DataObject) -> None:
    text = dump_policy(policy)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 5, len(text))))
    damage = data.draw(st.text(alphabet="{}[]:,#*&!|>'\"%@` \n\t-abc019.\x00\x85é", max_size=3))
    try:
        policy = _through_a_file(text[:start] + damage + text[end:])
    except PolicyFileError as error:
        message = str(error)
    else:
        message = "policy.yaml: " + dump_policy(policy)
    assert "policy.yaml:" in message


@given(st.text(max_size=60))
def test_any_text_is_refused_with_the_name_of_the_file(text: str) -> None:
    with pytest.raises(PolicyFileError, match=r"policy\.yaml:"):
        _through_a_file(text)


def _glob_matches(glob: str, text: str) -> bool:
    """Return whether `glob` matches all of `text`: the definition, without regular expressions."""
    if not glob:
        return not text
    if glob[0] == "*":
        return any(_glob_matches(glob[1:], text[skipped:]) for skipped in range(len(text) + 1))
    return bool(text) and glob[0] in ("?", text[0]) and _glob_matches(glob[1:], text[1:])


def _pattern_matches(text: str, site: Site) -> bool:
    module, _, rest = text.partition(":")
    op, _, index = rest.partition("#")
    parts = ((module, site.module), (op or "*", site.op), (index or "*", str(site.index)))
    return all(_glob_matches(glob, part) for glob, part in parts)


@given(patterns, sites)
@example("*", Site("", "add", 0))
@example(":add", Site("", "add", 0))
@example("a.*", Site("a", "add", 0))
@example("a?b", Site("a\nb", "add", 0))
def test_the_matcher_agrees_with_its_definition(text: str, site: Site) -> None:
    assert SitePattern(text).matches(site) == _pattern_matches(text, site)


@given(sites, sites)
def test_the_pattern_of_a_site_is_the_narrowest(site: Site, other: Site) -> None:
    pattern = SitePattern(pattern_of(site))
    assert pattern.matches(site)
    assert pattern.matches(other) == (other == site)


@given(policies, st.lists(sites, max_size=8, unique=True))
def test_the_first_rule_that_matches_wins(policy: Policy, all_sites: list[Site]) -> None:
    resolved = resolve(policy, all_sites)
    for site in all_sites:
        expected = next(i for i, rule in enumerate(policy.rules) if _pattern_matches(rule.sites, site))
        assert policy.format_of(site) == (policy.rules[expected].format, expected)
        assert policy.format_of(site) == policy.format_of(site)
        assert resolved.winners[site] == expected
        assert resolved.rule(site) == policy.rules[expected]
    won = set(resolved.winners.values())
    assert resolved.dead_rules == tuple(i for i in range(len(policy.rules) - 1) if i not in won)


@given(policies, st.lists(sites, max_size=8, unique=True))
def test_dropping_dead_rules_changes_no_site(policy: Policy, all_sites: list[Site]) -> None:
    fewer = resolve(policy, all_sites).without_dead_rules()
    assert not diff(policy, fewer, all_sites).sites
    assert resolve(fewer, all_sites).dead_rules == ()
    resolve(fewer, all_sites).check_alive()


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_presets_survive_the_file(kind: str) -> None:
    for name in preset_names(kind):
        policy = preset(name, kind)
        assert _through_a_file(dump_policy(policy)) == policy
