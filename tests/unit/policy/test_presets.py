"""The presets: which there are for which device, and what they say."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.ops import CATALOG
from autoprec.policy import (
    PRESETS,
    LossScale,
    Parameters,
    Policy,
    dump_policy,
    graph_preset_names,
    load_policy,
    preset,
    preset_names,
    resolve,
)

_BF16 = ("low-bf16", "bf16-master", "bf16-stochastic")
_WITH_TWIN = ("fp32", "fp32-matmul-bf16", "fp32-matmul-tf32", "autocast-bf16", "autocast-fp16", "bf16-master")


_COMPILED = ("fp32", "autocast-bf16", "bf16-master")


def _with_twins(*names: str) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        twins = (name, f"{name}-channels-last")[: 1 + (name in _WITH_TWIN)]
        found += [*twins, *(f"{twin}-compiled" for twin in twins if name in _COMPILED)]
    return tuple(found)


def _format(policy: Policy, op: str, module: str = "m") -> str:
    return policy.format_of(Site(module, op, 0))[0]


def test_names_by_device_kind() -> None:
    autocast, systems = ("autocast-bf16", "autocast-fp16"), ("apex-o1", "apex-o2", "apex-o3", "tpu-bf16", "fp16-resnet")
    rest = (*autocast, "fp8-matmul", *_BF16, *systems, "fp8-h100")
    assert preset_names("cpu") == _with_twins("fp32", "fp32-matmul-bf16", *rest)
    assert preset_names("cuda") == _with_twins("fp32", "fp32-matmul-tf32", *rest)
    assert preset_names("mps") == _with_twins("fp32", *autocast, *_BF16, *systems)
    assert graph_preset_names() == ("tf-graph-pass-bf16", "tf-graph-pass-fp16")


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_every_preset_is_named_for_itself_and_its_device(kind: str) -> None:
    for name in preset_names(kind):
        policy = preset(name, kind)
        assert policy.name == name
        assert dict(policy.device) == {"kind": kind}


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_every_preset_survives_its_file(kind: str, tmp_path: Path) -> None:
    for name in preset_names(kind):
        path = tmp_path / "policy.yaml"
        path.write_text(dump_policy(preset(name, kind)), encoding="utf-8")
        assert load_policy(path) == preset(name, kind)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_rules_may_be_idle_for_want_of_an_op_and_none_is_hidden_by_another(kind: str) -> None:
    sites = [Site(module, op.name, 0) for module in ("m", "@loss") for op in CATALOG.values() if op.is_site]
    for name in preset_names(kind):
        assert resolve(preset(name, kind), sites).dead_rules == (), name


def test_every_preset_says_what_it_is() -> None:
    for name, row in PRESETS.items():
        assert row.name == name
        assert row.stands_for
        assert row.does
        assert set(row.kinds) <= {"cpu", "cuda", "mps"}


@pytest.mark.parametrize("name", _WITH_TWIN)
def test_a_twin_differs_in_its_layout_alone(name: str) -> None:
    kind = "cuda" if "tf32" in name else "cpu"
    one, twin = preset(name, kind), preset(f"{name}-channels-last", kind)
    assert (one.memory_format, twin.memory_format) == ("as_given", "channels_last")
    assert replace(twin, name=name, memory_format="as_given") == one
    assert PRESETS[twin.name].for_convolutions
    assert not PRESETS[name].for_convolutions


def test_fp32_changes_nothing() -> None:
    policy = preset("fp32", "cpu")
    assert policy == Policy(name="fp32", device={"kind": "cpu"}, rules=policy.rules)
    assert [(rule.sites, rule.format) for rule in policy.rules] == [("*", "fp32")]


def test_reduced_matmul_precision() -> None:
    assert preset("fp32-matmul-bf16", "cpu").float32_matmul == "bf16"
    assert preset("fp32-matmul-tf32", "cuda").float32_matmul == "tf32"
    assert preset("fp32-matmul-tf32", "cuda").formats == ("fp32",)


def test_low_bf16_is_the_model_in_bf16() -> None:
    policy = preset("low-bf16", "cpu")
    assert policy.parameters.storage == "bf16"
    assert policy.outputs == "computed"
    assert _format(policy, "softmax") == "bf16"


def test_bf16_throughout_differs_in_what_becomes_of_a_small_step() -> None:
    found = {name: preset(name, "cpu") for name in _BF16}
    assert {policy.formats for policy in found.values()} == {("bf16",)}
    assert [policy.parameters for policy in found.values()] == [
        Parameters(storage="bf16"),
        Parameters(storage="bf16", master="fp32"),
        Parameters(storage="bf16", rounding="stochastic"),
    ]
    assert found["bf16-master"].rules[-1].why == "bf16 throughout with FP32 master weights"


@pytest.mark.parametrize(("name", "low"), [("autocast-bf16", "bf16"), ("autocast-fp16", "fp16")])
def test_autocast_states_torchs_lists(name: str, low: str) -> None:
    cpu, cuda = preset(name, "cpu"), preset(name, "cuda")
    for policy in (cpu, cuda):
        assert _format(policy, "linear") == low
        assert _format(policy, "cross_entropy", "@loss") == "fp32"
        assert _format(policy, "add") == "as_given"
        assert _format(policy, "my_own_op") == "as_given"
        assert policy.outputs == "computed"
    assert (_format(cpu, "softmax"), _format(cuda, "softmax")) == ("as_given", "fp32")
    assert (_format(cpu, "cat"), _format(cuda, "cat")) == ("promote", "as_given")
    assert (_format(cpu, "scatter_add"), _format(cuda, "scatter_add")) == ("as_given", "promote")


def test_fp8_matmul_is_autocast_with_linear_layers_in_fp8() -> None:
    policy, autocast = preset("fp8-matmul", "cuda"), preset("autocast-bf16", "cuda")
    assert (_format(policy, "linear"), _format(policy, "matmul"), _format(policy, "conv2d")) == (
        "fp8_e4m3",
        "bf16",
        "bf16",
    )
    assert policy.rules[1:] == tuple(rule for rule in autocast.rules if rule.sites != "*:linear")
    assert policy.outputs == "computed"
    assert "first and the last layer" in policy.rules[0].why


def test_only_fp16_scales_the_loss_and_as_grad_scaler_does() -> None:
    assert preset("autocast-bf16", "cuda").loss_scale == LossScale()
    scale = preset("autocast-fp16", "cuda").loss_scale
    assert scale.kind == "dynamic"
    assert (scale.initial, scale.growth_factor, scale.backoff_factor, scale.growth_interval) == (
        65536.0,
        2.0,
        0.5,
        2000,
    )
    assert (scale.minimum, scale.maximum) == (2.0**-126, 2.0**127)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "autocast-bf61",
            "cpu",
            '"autocast-bf61" is not a preset for cpu; presets: fp32, fp32-channels-last, fp32-compiled, fp',
        ),
        ("autocast-bf61", "cpu", 'fp8-h100; nearest: "autocast-bf16"'),
        ("fp32-matmul-tf32", "cpu", '"fp32-matmul-tf32" is not a preset for cpu'),
        ("tf-graph-pass-bf16", "cpu", 'preset "tf-graph-pass-bf16" is made for the graph of a workload; write it as'),
        ("fp32", "tpu", 'presets for device kind "tpu"; device kinds: cpu, cuda, mps'),
    ],
)
def test_what_is_refused(name: str, kind: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        preset(name, kind)


# Ops on a list of Apex O1 and on none of torch.autocast on CUDA: torch promotes most of these by itself by now.
_ONLY_APEX_PROMOTES = {"add", "div", "equal", "mul", "sub", "cat", "stack"}
_ONLY_APEX_KEEPS = {"std", "var"}


def test_apex_o1_agrees_with_autocast_where_both_list_an_op() -> None:
    apex, autocast = preset("apex-o1", "cuda"), preset("autocast-fp16", "cuda")
    listed = {rule.sites.removeprefix("*:"): rule.format for rule in apex.rules[:-1]}
    theirs = {rule.sites.removeprefix("*:"): rule.format for rule in autocast.rules[:-1]}
    assert {op for op in listed.keys() & theirs.keys() if listed[op] != theirs[op]} == set()
    alone = {op: fmt for op, fmt in listed.items() if op not in theirs}
    assert {op for op, fmt in alone.items() if fmt == "promote"} == _ONLY_APEX_PROMOTES
    assert "fp16" not in alone.values()
    assert {op for op, fmt in alone.items() if fmt == "fp32"} == _ONLY_APEX_KEEPS


def test_apex_levels_differ_as_its_table_of_properties_says() -> None:
    o1, o2, o3 = (preset(f"apex-o{level}", "cuda") for level in (1, 2, 3))
    assert [each.parameters for each in (o1, o2, o3)] == [
        Parameters(),
        Parameters(storage="fp16", master="fp32", batch_norm="fp32"),
        Parameters(storage="fp16"),
    ]
    assert [each.outputs for each in (o1, o2, o3)] == ["computed", "fp32", "fp32"]
    assert (o1.loss_scale, o3.loss_scale) == (o2.loss_scale, LossScale())
    assert (o1.loss_scale.initial, o1.loss_scale.maximum, o1.loss_scale.growth_interval) == (2.0**16, 2.0**24, 2000)
    assert [_format(each, "mul", "@loss") for each in (o1, o2, o3)] == ["promote", "as_given", "as_given"]
    assert [_format(each, "softmax") for each in (o1, o2, o3)] == ["fp32", "fp16", "fp16"]


@pytest.mark.parametrize(
    ("name", "low", "norms"),
    [("tpu-bf16", "bf16", "fp32"), ("fp16-resnet", "fp16", "fp16"), ("fp8-h100", "bf16", "bf16")],
)
def test_recipes_keep_softmaxes_and_losses(name: str, low: str, norms: str) -> None:
    policy = preset(name, "cuda")
    for op in CATALOG.values():
        if op.is_site and op.family in ("softmax", "loss"):
            assert _format(policy, op.name) == "fp32"
    assert _format(policy, "mul", "@loss") == "fp32"
    assert _format(policy, "batch_norm") == norms
    assert _format(policy, "matmul") == low
    assert _format(policy, "linear") == ("fp8_e4m3" if name == "fp8-h100" else low)
    assert policy.parameters == Parameters()
    assert policy.loss_scale.kind == ("dynamic" if low == "fp16" else "none")
    assert policy.outputs == "fp32"
