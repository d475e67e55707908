"""Static plans."""

import dataclasses

from autoprec.policy import resolve
from autoprec.search.choices import dimensions, policy_of
from autoprec.search.plans import plans
from tests.unit.search.blocks import SITES, SPACE, layout, rows


def low_ops(name: str) -> set[str]:
    """Return the ops that a plan runs low."""
    plan = next(each for each in plans(rows()) if each.name == name)
    resolved = resolve(policy_of(plan.choice, layout(), name=name, device={}), SITES)
    return {site.op for site in SITES if resolved.format(site) != "fp32"}


def test_plans_do_what_their_names_say() -> None:
    assert low_ops("free-ops-bf16") == {"matmul", "linear", "conv2d", "mul"}
    assert low_ops("matmul-only-bf16") == {"matmul", "linear"}
    assert low_ops("convolution-only-bf16") == {"conv2d"}
    assert low_ops("all-but-convolution-fp16") == {"matmul", "linear", "mul"}
    assert low_ops("free-ops-and-norms-bf16") == {"matmul", "linear", "conv2d", "mul", "layer_norm"}
    assert low_ops("all-bf16") == {"matmul", "linear", "conv2d", "mul", "layer_norm", "softmax"}


def test_the_graph_pass_comes_first() -> None:
    assert plans(rows())[0].name == "free-ops-bf16"


def test_a_choice_is_planned_once_and_its_values_exist() -> None:
    choices = [tuple(sorted(plan.choice.items())) for plan in plans(rows())]
    assert len(set(choices)) == len(choices)
    values = {row.name: row.values for row in rows()}
    assert all(value in values[name] for choice in choices for name, value in choice)


def test_plans_about_ops_that_are_not_there_are_left_out() -> None:
    assert not any("recurrent" in plan.name for plan in plans(rows()))


def test_every_plan_comes_in_every_layout_that_is_offered() -> None:
    space = dataclasses.replace(SPACE, memory_format=("as_given", "channels_last"))
    names = [plan.name for plan in plans(rows(space))]
    plain = [plan.name for plan in plans(rows())]
    assert names == [f"{name}{suffix}" for name in plain for suffix in ("", "-channels-last")]
    for plan in plans(rows(space)):
        is_last = plan.name.endswith("-channels-last")
        assert plan.choice["memory_format"] == ("channels_last" if is_last else "as_given")


def test_a_fused_optimizer_is_planned_with_fp32_and_with_all_free_ops() -> None:
    space = dataclasses.replace(SPACE, optimizer=("as_given", "fused"), memory_format=("as_given", "channels_last"))
    fused = {plan.name: plan for plan in plans(rows(space)) if plan.choice["optimizer"] == "fused"}
    assert list(fused) == [
        f"{name}{suffix}"
        for name in ("fp32-fused", "free-ops-fused-bf16", "free-ops-fused-fp16")
        for suffix in ("", "-channels-last")
    ]
    for name, plan in fused.items():
        policy = policy_of(plan.choice, layout(space), name=name, device={})
        assert policy.optimizer == "fused"
        assert (policy.formats == ("fp32",)) == name.startswith("fp32")


def test_fp32_and_the_fastest_plan_of_each_format_are_planned_under_torch_compile() -> None:
    space = dataclasses.replace(SPACE, compile=("as_given", "inductor"), optimizer=("as_given", "fused"))
    compiled = {plan.name: plan.choice for plan in plans(rows(space)) if plan.choice["compile"] == "inductor"}
    assert list(compiled) == ["fp32-compiled-fused", "free-ops-bf16-compiled", "free-ops-fp16-compiled"]
    assert all(choice["optimizer"] == "fused" for choice in compiled.values())
    fp32 = policy_of(compiled["fp32-compiled-fused"], layout(), name="p", device={})
    assert {resolve(fp32, SITES).format(site) for site in SITES} == {"fp32"}
    assert "compile" not in plans(rows())[0].choice


def test_all_of_a_front_is_planned_the_fastest_first_and_what_lies_beyond_it_is_faster() -> None:
    sets = (frozenset(SITES), frozenset(SITES[:3]))
    planned = dataclasses.replace(layout(), fronts={"bf16": sets, "fp16": sets[:1]}, beyond={"bf16": sets})
    found = [plan for plan in plans(dimensions(SPACE, planned)) if plan.front]
    names = ("beyond-1", "beyond-0", "cut-0", "cut-1")
    assert [plan.name for plan in found] == [f"{name}-{low}" for name in names for low in ("bf16", "fp16")]
    assert {plan.front for plan in found} == {"bf16", "fp16"}
    space = dataclasses.replace(SPACE, compile=("as_given", "inductor"), memory_format=("as_given", "channels_last"))
    compiled = {plan.name: plan for plan in plans(dimensions(space, planned)) if plan.choice["compile"] == "inductor"}
    assert compiled["cut-0-bf16-compiled"].front == ""
    assert not any("beyond" in name for name in compiled)
    fronts = {plan.front for plan in plans(dimensions(space, planned)) if plan.front}
    assert fronts == {"bf16", "fp16", "bf16-channels-last", "fp16-channels-last"}
