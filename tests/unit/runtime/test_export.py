"""Exports of a policy: what they choose, and that they say what they leave out of this policy."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import PolicyError
from autoprec.policy import Float8, LossScale, Parameters, Policy, Rule
from autoprec.runtime.export import float8_module_filter, fsdp2_policies


def policy(*rules: tuple[str, str], **settings: object) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules), **settings)  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(self.rise(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def dtypes(rules: Policy) -> dict[str, torch.dtype | None]:
    return {path: each.param_dtype for path, each in fsdp2_policies(Net(), rules).policies.items()}


def test_a_uniform_policy_is_one_unit() -> None:
    export = fsdp2_policies(Net(), policy(("*", "bf16")))
    assert list(export.policies) == [""]
    root = export.policies[""]
    assert (root.param_dtype, root.reduce_dtype, root.output_dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert export.unexpressed == (
        'norm parameters of "blocks.0.norm" and 1 more are gathered in bf16; apply() keeps them as stored and casts '
        "the activation alone",
        'rule "*" (bf16): it covers functional ops too, as in the root and 3 more: they run in whatever dtype '
        "reaches them",
    )
    assert fsdp2_policies(Net(), policy(("*", "bf16"), outputs="computed")).policies[""].output_dtype is None


def test_units_are_the_outermost_modules_of_one_format_children_first() -> None:
    assert dtypes(policy(("head", "fp32"), ("*", "bf16"))) == {
        "blocks.0": torch.bfloat16,
        "blocks.1": torch.bfloat16,
        "head": torch.float32,
        "": torch.float32,
    }
    assert dtypes(policy(("*.norm", "fp32"), ("blocks.0.*", "fp16"), ("*", "bf16"))) == {
        "blocks.0.norm": torch.float32,
        "blocks.0.rise": torch.float16,
        "blocks.0.fall": torch.float16,
        "blocks.1.norm": torch.float32,
        "blocks.1.rise": torch.bfloat16,
        "blocks.1.fall": torch.bfloat16,
        "head": torch.bfloat16,
        "": torch.float32,
    }


def test_an_fp32_policy_leaves_nothing_out() -> None:
    export = fsdp2_policies(Net(), policy(("*", "fp32")))
    assert export.unexpressed == ()
    assert export.policies[""].param_dtype == torch.float32


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ((":add#1", "bf16"), r'rule ":add#1" \(bf16\): it tells the calls of one op in a module apart'),
        (("@loss", "bf16"), r'rule "@loss" \(bf16\): it is about loss code'),
        (("head", "promote"), r'rule "head" \(promote\): it has no counterpart'),
        (("blocks.*:relu", "bf16"), r'rule "blocks.\*:relu" \(bf16\): it is about ops inside modules'),
        (("blocks.0", "bf16"), r'rule "blocks.0" \(bf16\): its modules have no parameters'),
    ],
)
def test_a_rule_that_is_not_about_parameters_is_told(rule: tuple[str, str], reason: str) -> None:
    (told,) = (text for text in fsdp2_policies(Net(), policy(rule, ("*", "fp32"))).unexpressed if "rule" in text)
    assert re.match(reason, told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"float32_matmul": "bf16"}, ["float32_matmul: bf16"]),
        ({"loss_scale": LossScale(kind="static", initial=8.0)}, ["loss_scale: static, initial 8"]),
        ({"memory_format": "channels_last"}, ["memory_format: channels_last"]),
        ({"optimizer": "fused"}, ["optimizer: fused"]),
        ({"compile": "inductor"}, ["compile: inductor"]),
        (
            {
                "parameters": Parameters(
                    storage="bf16", master="fp32", gradients="storage", keep=("*.bias",), batch_norm="fp32"
                )
            },
            [
                "parameters.storage: bf16",
                "parameters.keep: *.bias",
                "parameters.batch_norm: fp32",
                "parameters.master: fp32",
                "parameters.gradients: storage",
            ],
        ),
        (
            {"parameters": Parameters(storage="bf16", rounding="stochastic")},
            ["parameters.storage: bf16", "parameters.rounding: stochastic"],
        ),
        ({"parameters": Parameters(optimizer_state="8bit")}, ["parameters.optimizer_state: 8bit"]),
    ],
)
def test_settings_beside_the_rules_are_told(settings: dict[str, Any], told: list[str]) -> None:
    rules = policy(("*", "fp32"), **settings)
    for export in (fsdp2_policies(Net(), rules), float8_module_filter(Net(), rules)):
        assert [text.rpartition(": ")[0] for text in export.unexpressed] == told


def test_the_scaling_of_fp8_is_the_recipe_of_torchao_and_nothing_to_fsdp2() -> None:
    rules = policy(("*", "fp32"), float8=Float8(scaling="rowwise"))
    assert fsdp2_policies(Net(), rules).unexpressed == ("float8: {scaling: rowwise}: FSDP2 multiplies nothing in fp8",)
    assert float8_module_filter(Net(), rules).recipe == "rowwise"
    assert float8_module_filter(Net(), policy(("*", "fp32"))).recipe == "tensorwise"


@pytest.mark.parametrize("name", ["tf32", "fp32_bf16", "fp32_ieee"])
@pytest.mark.parametrize("rules", [[("head:linear", ""), ("*", "fp32")], [("*", "")]])
def test_a_precision_inside_fp32_matmuls_is_told_wherever_it_stands(name: str, rules: list[tuple[str, str]]) -> None:
    export = fsdp2_policies(Net(), policy(*((sites, fixed or name) for sites, fixed in rules)))
    assert {each.param_dtype for each in export.policies.values()} == {torch.float32}
    (told,) = export.unexpressed
    assert told.startswith(f'rule "{rules[0][0]}" ({name}): the precision inside FP32 matmuls is a setting of torch')


def test_fp8_is_not_for_fsdp2() -> None:
    with pytest.raises(
        PolicyError, match='module "head" runs in fp8_e4m3; FSDP2 gathers parameters in fp32, bf16 or fp16'
    ):
        fsdp2_policies(Net(), policy(("head:linear", "fp8_e4m3"), ("*", "fp32")))


def test_a_precision_inside_fp32_is_told_and_gathered_as_fp32() -> None:
    export = fsdp2_policies(Net(), policy(("head:linear", "tf32"), ("*", "bf16")))
    assert export.policies["head"].param_dtype == torch.float32
    assert any("set torch.backends.*.fp32_precision by hand" in each for each in export.unexpressed)


def test_the_float8_filter_chooses_the_linears_of_the_policy() -> None:
    model = Net()
    export = float8_module_filter(model, policy(("blocks.0.*:linear", "fp8_e4m3"), ("*:linear", "bf16"), ("*", "fp32")))
    assert export.modules == ("blocks.0.rise", "blocks.0.fall")
    chosen = [path for path, module in model.named_modules() if export.module_filter(module, path)]
    assert chosen == list(export.modules)
    assert export.unexpressed[0] == "sites in bf16: the filter chooses float8 or nothing; keep apply() for these"


def test_what_float8_cannot_take_is_told() -> None:
    export = float8_module_filter(Net(), policy(("head:linear", "fp8_e4m3"), ("*", "fp32")))
    assert export.modules == ()
    assert export.unexpressed[:1] == (
        'module "head" asks for fp8_e4m3 and stays as it is: its weight is [10, 16], and float8 matmuls take '
        "multiples of 16",
    )


@pytest.mark.filterwarnings("ignore")  # torchao's own at import
def test_torchao_converts_what_the_filter_chooses() -> None:
    float8 = pytest.importorskip("torchao.float8")
    model = Net()
    export = float8_module_filter(model, policy(("blocks.*:linear", "fp8_e4m3"), ("*", "fp32")))
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(model, module_filter_fn=export.module_filter, config=config)
    converted = [path for path, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    assert converted == list(export.modules)
    model(torch.randn(16, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
