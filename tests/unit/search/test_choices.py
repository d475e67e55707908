"""From a choice to a policy."""

import dataclasses
import random

import pytest

from autoprec.analysis import Mark, Reason, ReasonCode
from autoprec.graph.site import Site
from autoprec.policy import LossScale, Parameters, Rule, preset, resolve
from autoprec.search.choices import (
    FP32,
    LOW,
    Value,
    active,
    choice_key,
    defaults,
    dimensions,
    policy_of,
    run_key,
    targets_of,
)
from autoprec.search.layout import layout_of
from autoprec.search.space import Space
from tests.unit.search.blocks import LAYERS, MARKS, SITES, SPACE, layout, mark, rows, site

DEVICE = {"kind": "cpu", "name": "Testium"}


def changed(low: str = "bf16", **changes: Value) -> dict[str, Value]:
    """Return the default choice with `changes`; `__` stands for a colon and `_any_` for a star."""
    return defaults(rows(), low) | {
        name.replace("__", ":").replace("_any_", "*"): value for name, value in changes.items()
    }


def formats(**changes: Value) -> dict[Site, str]:
    """Return the format of every site under a changed default choice for bf16."""
    choice = changed("bf16", **changes)
    return dict(resolve(policy_of(choice, layout(), name="p", device=DEVICE), SITES).formats)


def test_every_kind_of_choice_has_a_dimension() -> None:
    assert [row.name for row in rows()] == [
        "low",
        "float32_matmul",
        "layer:blocks.*.attn",
        "layer:blocks.*.norm",
        "layer:blocks.*.attn.proj",
        "layer:head",
        "layer:",
        "family:matmul",
        "family:convolution",
        "family:pointwise",
        "op:softmax",
        "op:layer_norm",
        "loss_scale.initial",
        "loss_scale.growth_interval",
    ]


def test_grouping_by_module_gives_every_block_its_own_choice() -> None:
    names = [row.name for row in rows(Space(grouping="module", prefer=SPACE.prefer))]
    assert {"layer:blocks.0.attn", "layer:blocks.1.attn"} <= set(names)


def test_the_loss_scale_exists_for_fp16_alone() -> None:
    assert "loss_scale.initial" not in {row.name for row in active(rows(), "bf16")}
    assert "loss_scale.initial" in {row.name for row in active(rows(), "fp16")}


def test_a_prefer_op_outside_the_space_is_never_lowered() -> None:
    assert formats(op__cross_entropy=LOW)[site("@loss:cross_entropy#0")] == "fp32"


def test_the_default_choice_is_the_graph_pass_in_readable_rules() -> None:
    policy = policy_of(defaults(rows(), "bf16"), layout(), name="p", device=DEVICE)
    assert policy.rules == (
        Rule(sites="*:softmax", format="fp32", why="saturates"),
        Rule(sites="*:layer_norm", format="fp32", why="long sums"),
        Rule(sites="*:cross_entropy", format="fp32", why="logs"),
        Rule(sites="*", format="bf16"),
    )
    assert policy.loss_scale == LossScale()


def test_a_lowered_op_has_no_rule_left() -> None:
    policy = policy_of(changed(op__softmax=LOW), layout(), name="p", device=DEVICE)
    assert "*:softmax" not in [rule.sites for rule in policy.rules]


def test_a_layer_in_fp32_leaves_the_modules_inside_it_low() -> None:
    found = formats(**{"layer__blocks._any_.attn": FP32})
    assert found[site("blocks.1.attn:matmul#1")] == "fp32"
    assert found[site("blocks.1.attn.proj:linear#0")] == "bf16"


def test_a_family_in_fp32_is_named_by_its_ops() -> None:
    policy = policy_of(changed(family__convolution=FP32), layout(), name="p", device=DEVICE)
    assert "*:conv2d" in [rule.sites for rule in policy.rules]


def test_few_low_sites_are_named_instead_of_many_fp32_ones() -> None:
    choice = changed(family__matmul=FP32, family__pointwise=FP32)
    policy = policy_of(choice, layout(), name="p", device=DEVICE)
    assert policy.rules == (Rule(sites="*:conv2d", format="bf16"), Rule(sites="*", format="fp32"))


def test_everything_in_fp32_is_one_rule_and_needs_no_loss_scale() -> None:
    choice = changed("fp16", **{row.name.replace(":", "__"): FP32 for row in rows() if row.name.startswith("layer:")})
    policy = policy_of(choice, layout(), name="p", device=DEVICE)
    assert policy.rules == (Rule(sites="*", format="fp32"),)
    assert policy.loss_scale.kind == "none"


def test_fp16_takes_the_chosen_loss_scale() -> None:
    choice = changed("fp16") | {"loss_scale.initial": 1024.0, "loss_scale.growth_interval": 50}
    scale = policy_of(choice, layout(), name="p", device=DEVICE).loss_scale
    assert (scale.kind, scale.initial, scale.growth_interval) == ("dynamic", 1024.0, 50)


def test_a_must_stays_in_fp32_whatever_is_chosen() -> None:
    found = layout(extra=(mark(site(":mul#0"), "bf16", "must", "overflows"),))
    choice = changed() | {row.name: LOW for row in dimensions(SPACE, found) if row.name.startswith("op:")}
    policy = policy_of(choice, found, name="p", device=DEVICE)
    assert policy.rules[0] == Rule(sites="*:mul", format="fp32", why="overflows")


def test_what_reads_a_kept_result_follows_the_op_that_made_it() -> None:
    where = site(":mul#0")
    reason = Reason(
        code=ReasonCode.CONTAMINATED, detail="reads", evidence={"origin": str(site("blocks.0.norm:layer_norm#0"))}
    )
    found = layout(extra=(Mark(site=where, format="bf16", verdict="prefer", reasons=(reason,)),))
    kept = resolve(policy_of(changed(), found, name="p", device=DEVICE), SITES)
    lowered = resolve(policy_of(changed(op__layer_norm=LOW), found, name="p", device=DEVICE), SITES)
    assert (kept.format(where), lowered.format(where)) == ("fp32", "bf16")


def test_sites_that_cannot_be_lowered_take_no_part() -> None:
    found = layout_of(MARKS, LAYERS, SPACE, lowerable=[each for each in SITES if str(each) != ":mul#0"])
    policy = policy_of(changed(family__pointwise=FP32), found, name="p", device=DEVICE)
    assert "*:mul" not in [rule.sites for rule in policy.rules]


def test_choices_that_run_alike_share_a_key() -> None:
    one = changed(**{"layer__blocks._any_.norm": FP32})
    assert choice_key(one, layout()) == choice_key(changed(), layout())
    assert choice_key(changed("fp16"), layout()) != choice_key(changed(), layout())
    assert choice_key(changed() | {"float32_matmul": "tf32"}, layout()) != choice_key(changed(), layout())


@pytest.mark.parametrize("seed", range(20))
def test_rules_say_what_the_choice_says_and_all_win_somewhere(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.choice(("bf16", "fp16"))
    choice = {row.name: rng.choice(row.values) for row in active(rows(), low)} | {"low": low}
    resolved = resolve(policy_of(choice, layout(), name="p", device=DEVICE), SITES)
    assert dict(resolved.formats) == targets_of(choice, layout())[0]
    resolved.check_alive()
    assert set(resolved.winners.values()) == set(range(len(resolved.policy.rules)))


def test_storage_is_a_dimension_where_the_space_offers_it() -> None:
    space = Space(prefer=SPACE.prefer, storage=("fp32", "bf16-master", "bf16-stochastic"))
    (row,) = [row for row in rows(space) if row.name == "storage"]
    assert (row.values, row.default) == (space.storage, "fp32")
    base = defaults(rows(space), "bf16")
    keys, stored = set(), []
    for name in row.values:
        choice = base | {"storage": name}
        keys.add(choice_key(choice, layout()))
        stored.append(policy_of(choice, layout(), name="p", device=DEVICE).parameters)
    assert len(keys) == 3
    assert choice_key(base, layout()) == choice_key(defaults(rows(), "bf16"), layout())
    assert stored == [
        Parameters(),
        Parameters(storage="bf16", master="fp32"),
        Parameters(storage="bf16", rounding="stochastic"),
    ]


def test_the_only_storage_of_a_space_is_chosen() -> None:
    choice = defaults(rows(Space(storage=("bf16-master",))), "bf16")
    assert policy_of(choice, layout(), name="p", device=DEVICE).parameters.master == "fp32"


def test_the_layout_is_a_dimension_where_the_space_offers_it() -> None:
    assert all(row.name != "memory_format" for row in rows())
    space = dataclasses.replace(SPACE, memory_format=("as_given", "channels_last"))
    (row,) = [row for row in rows(space) if row.name == "memory_format"]
    assert (row.values, row.default, row.only_for) == (("as_given", "channels_last"), "as_given", "")
    base = defaults(rows(space), "bf16")
    policies = [policy_of(base | {"memory_format": name}, layout(), name="p", device=DEVICE) for name in row.values]
    assert [policy.memory_format for policy in policies] == ["as_given", "channels_last"]
    assert choice_key(base, layout()) == choice_key(defaults(rows(), "bf16"), layout())
    assert choice_key(base | {"memory_format": "channels_last"}, layout()) != choice_key(base, layout())
    only = dataclasses.replace(SPACE, memory_format=("channels_last",))
    assert defaults(rows(only), "bf16")["memory_format"] == "channels_last", "a single layout is still a choice"


def test_fp32_everywhere_is_the_baseline_of_its_layout() -> None:
    for name in ("fp32", "fp32-channels-last"):
        policy = preset(name, "cpu")
        choice = changed(**{row.name.replace(":", "__"): FP32 for row in rows() if row.name.startswith("layer:")})
        choice["memory_format"] = policy.memory_format
        assert choice_key(choice, layout()) == run_key(policy, resolve(policy, layout().sites).formats)


def test_the_kernels_of_the_optimizer_are_a_dimension_where_the_space_offers_them() -> None:
    space = dataclasses.replace(SPACE, optimizer=("as_given", "fused"))
    (row,) = [row for row in rows(space) if row.name == "optimizer"]
    assert (row.values, row.default) == (("as_given", "fused"), "as_given")
    base = defaults(rows(space), "bf16")
    fused = base | {"optimizer": "fused"}
    assert policy_of(fused, layout(), name="p", device=DEVICE).optimizer == "fused"
    assert choice_key(base, layout()) == choice_key(defaults(rows(), "bf16"), layout()) != choice_key(fused, layout())


def test_compilation_is_a_dimension_where_the_space_offers_it() -> None:
    space = dataclasses.replace(SPACE, compile=("as_given", "inductor"))
    (row,) = [row for row in rows(space) if row.name == "compile"]
    assert (row.values, row.default) == (("as_given", "inductor"), "as_given")
    base = defaults(rows(space), "bf16")
    compiled = base | {"compile": "inductor"}
    assert policy_of(compiled, layout(), name="p", device=DEVICE).compile == "inductor"
    assert (
        choice_key(base, layout()) == choice_key(defaults(rows(), "bf16"), layout()) != choice_key(compiled, layout())
    )
