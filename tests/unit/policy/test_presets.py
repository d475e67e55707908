"""The presets: which there are for which device, and what they say."""

import re

import pytest

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.policy import LossScale, Parameters, Policy, preset, preset_names

_BF16 = ("low-bf16", "bf16-master", "bf16-stochastic")


def _format(policy: Policy, op: str, module: str = "m") -> str:
    return policy.format_of(Site(module, op, 0))[0]


def test_names_by_device_kind() -> None:
    assert preset_names("cpu") == ("fp32", "fp32-matmul-bf16", "autocast-bf16", "autocast-fp16", "fp8-matmul", *_BF16)
    assert preset_names("cuda") == ("fp32", "fp32-matmul-tf32", "autocast-bf16", "autocast-fp16", "fp8-matmul", *_BF16)
    assert preset_names("mps") == ("fp32", "autocast-bf16", "autocast-fp16", *_BF16)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_every_preset_is_named_for_itself_and_its_device(kind: str) -> None:
    for name in preset_names(kind):
        policy = preset(name, kind)
        assert policy.name == name
        assert dict(policy.device) == {"kind": kind}


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
        ("autocast-bf61", "cpu", '"autocast-bf61" is not a preset for cpu; presets: fp32, fp32-matmul-bf16, autocast'),
        ("autocast-bf61", "cpu", 'bf16-stochastic; nearest: "autocast-bf16"'),
        ("fp32-matmul-tf32", "cpu", '"fp32-matmul-tf32" is not a preset for cpu'),
        ("fp32", "tpu", 'presets for device kind "tpu"; device kinds: cpu, cuda, mps'),
    ],
)
def test_what_is_refused(name: str, kind: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        preset(name, kind)
