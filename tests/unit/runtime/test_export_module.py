"""The text of an export: a module that runs without autoprec and does what the export says."""

import ast
import builtins
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import PolicyError
from autoprec.policy import Float8, Policy, Rule
from autoprec.runtime.export import float8_module_filter, fsdp2_policies
from autoprec.runtime.export_module import Origin, float8_module, fsdp2_module

ORIGIN = Origin(policy="mine", file="mine.yaml", workload="net.py", graph="00ff")


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules), **settings)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the module defines, made where autoprec cannot be imported."""
    original, made = builtins.__import__, {}

    def without_autoprec(name: str, *rest: Any, **named: Any) -> Any:
        assert not name.startswith("autoprec")
        return original(name, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_autoprec)
        exec(text, made)
    return made


def test_fsdp2_text() -> None:
    text = fsdp2_module(fsdp2_policies(model(), policy(("0", "fp32"), ("*", "bf16"))), ORIGIN)
    assert ast.get_docstring(ast.parse(text)) == (
        "Shard a model with FSDP2 in the formats of a policy.\n\n"
        'Made by autoprec from policy "mine" (mine.yaml) on net.py, graph 00ff.\n\n'
        "What this file cannot express of the policy:\n\n"
        '- rule "*" (bf16): it covers functional ops too, as in the root and 1 more: they run in whatever dtype '
        "reaches them"
    )
    rows = (
        "MODULES = (\n"
        '    ("0", torch.float32, torch.float32, None),\n'
        '    ("2", torch.bfloat16, torch.float32, None),\n'
        '    ("", torch.float32, torch.float32, torch.float32),\n'
        ")\n"
    )
    assert rows in text


def test_the_fsdp2_module_shards_in_order_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    export = fsdp2_policies(net, policy(("0", "fp32"), ("*", "bf16")))
    made = run(fsdp2_module(export, ORIGIN), monkeypatch)
    calls: list[tuple[nn.Module, dict[str, Any]]] = []
    made["fully_shard"] = lambda module, **options: calls.append((module, options))
    assert made["shard"](net, mesh="mesh") is net
    wanted = [(net.get_submodule(path), {"mp_policy": each, "mesh": "mesh"}) for path, each in export.policies.items()]
    assert calls == wanted
    calls.clear()
    with pytest.raises(AttributeError, match="0"):
        made["shard"](nn.Linear(2, 2))
    assert calls == []


def test_an_export_that_leaves_nothing_out_says_so() -> None:
    text = fsdp2_module(fsdp2_policies(model(), policy(("*", "fp32"))), ORIGIN)
    assert str(ast.get_docstring(ast.parse(text))).endswith("\n\nNothing is left out.")


@pytest.mark.parametrize("name", ['"""', '\\" + 1', 'a"', "two\nlines", "\x00", "ä {rows} {recipe}", "\\N{x}"])
def test_any_name_can_stand_in_the_docstring_and_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Module()
    net.add_module(name, nn.Linear(16, 16))
    net.add_module("norm", nn.LayerNorm(16))
    fp8 = policy((":linear", "bf16"), ("*:linear", "fp8_e4m3"), ("*", "fp32"))
    origin = Origin(policy=name, file="f", workload=name, graph="0")
    for text in (
        fsdp2_module(fsdp2_policies(net, policy(("norm", "bf16"), ("*", "fp32"))), origin),
        float8_module(float8_module_filter(net, fp8), origin),
    ):
        compile(text, "export", "exec")
        assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        table = ast.Module([node for node in assigned if ast.unparse(node.targets[0]) == "MODULES"], [])
        assert name in {node.value for node in ast.walk(table) if isinstance(node, ast.Constant)}
        shown = name if name.isprintable() else name.encode("unicode_escape").decode()
        assert f'policy "{shown}" (f)' in str(ast.get_docstring(ast.parse(text), clean=False))


@pytest.mark.filterwarnings("ignore")  # torchao's own at import
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_the_float8_module_converts(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    float8 = pytest.importorskip("torchao.float8")
    rules = policy(("2:linear", "fp8_e4m3"), ("*", "fp32"), float8=Float8(scaling=scaling))
    net = model()
    made = run(float8_module(float8_module_filter(net, rules), ORIGIN), monkeypatch)
    assert made["MODULES"] == ("2",)
    assert made["convert"](net, emulate=True) is net
    assert [type(each).__name__ for each in net] == ["Linear", "ReLU", "Float8Linear"]
    config = net[2].config
    assert config.emulate
    assert config.cast_config_weight == float8.Float8LinearConfig.from_recipe_name(scaling).cast_config_weight
    y = net(torch.randn(16, 16))
    y.sum().backward()
    assert y.dtype == torch.float32  # as the docstring says
    assert all(parameter.grad is not None for parameter in net.parameters())
    with pytest.raises(AttributeError):
        made["convert"](nn.Linear(16, 16))


def test_an_export_to_float8_that_chooses_nothing_is_refused() -> None:
    with pytest.raises(PolicyError, match=r'policy "mine" to torchao-float8: no linear would run in fp8_e4m3: no rule'):
        float8_module(float8_module_filter(model(), policy(("*", "bf16"))), ORIGIN)
    small = nn.Sequential(nn.Linear(3, 16))
    with pytest.raises(PolicyError, match=r'fp8_e4m3: module "0" asks for fp8_e4m3 .* its weight is \[16, 3\]'):
        float8_module(float8_module_filter(small, policy(("*:linear", "fp8_e4m3"), ("*", "fp32"))), ORIGIN)
