"""In which formats parameters are used, and which modules FSDP2 can gather as one."""

import torch
from torch import nn

import autoprec
from autoprec.capture import record
from autoprec.graph.site import Site
from autoprec.graph.uses import Uses, uses_of
from autoprec.policy import Policy, Rule
from autoprec.runtime.export import float8_module_filter, fsdp2_policies
from autoprec.runtime.used_parameters import units, used_parameters


def policy(*rules: tuple[str, str]) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules))


def recorded(build: type[nn.Module], size: int = 16) -> tuple[nn.Module, Uses]:
    workload = autoprec.Workload(
        model=build, batches=lambda: [torch.ones(2, 3, size)], loss=lambda model, x: model(x).square().mean()
    )
    recording = record(workload)
    return recording.model, uses_of(recording.op_graph)


def gathered(model: nn.Module, rules: Policy, uses: Uses | None = None) -> dict[str, str]:
    return {path: name for path, name, _ in units(model, used_parameters(model, rules, uses))}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.between(self.first(x)))
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.attention(x, x, x, need_weights=False)[0])
        return y


class ByHand(nn.Module):
    """Reads its own parameters in three ways, and the weight of a child that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.eye(16)), nn.Parameter(torch.ones(16))
        self.child, self.rest = nn.Linear(16, 16), nn.ParameterList([torch.ones(16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mean()
        return nn.functional.linear(x @ self.weight.t() * self.scale, self.child.weight) + self.rest[0]


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hand, self.head = ByHand(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.hand(x))
        return y


def test_a_tied_parameter_belongs_to_the_module_around_all_that_hold_it() -> None:
    rules = policy(("last", "fp32"), ("*", "bf16"))
    assert gathered(Tied(), rules) == {"between": "bf16", "": "fp32"}
    first = used_parameters(Tied(), rules)[0]
    assert (first.name, first.holders, first.home) == ("first.weight", ("first", "last"), "")
    assert (first.formats, first.format) == ({"fp32", "bf16"}, "fp32")
    told = fsdp2_policies(Tied(), rules).unexpressed[:3]
    assert told == (
        'parameter "first.weight": used in bf16 and fp32 (first:linear#0, last:linear#0) and gathered in fp32, since '
        "FSDP2 gathers a module in one dtype",
        'parameter "first.bias": used in bf16 (first:linear#0) and gathered in fp32, since FSDP2 gathers a module in '
        "one dtype",
        'module "first" and 1 more is gathered with the root: FSDP2 casts what comes into a unit; cast what comes from '
        "units in bf16 to fp32 by hand",
    )


def test_parameters_of_a_module_around_units_of_another_format_are_told() -> None:
    told = fsdp2_policies(ByHand(), policy(("child", "bf16"), ("*", "fp32"))).unexpressed
    assert told[0] == (
        "the root and 1 more is gathered with the root: FSDP2 casts what comes into a unit; cast what comes from units "
        "in bf16 to fp32 by hand"
    )


def test_without_a_recording_classes_say_which_site_reads() -> None:
    assert gathered(Tied(), policy(("*:linear", "bf16"), ("*", "fp32"))) == {"": "bf16"}
    assert gathered(Holder(), policy(("*:mm", "bf16"), ("*", "fp32"))) == {"": "fp32"}
    by_parts = gathered(Holder(), policy(("hand.child", "bf16"), ("*", "fp32")))
    assert by_parts == {"hand.child": "bf16", "hand": "fp32", "head": "fp32"}


def test_a_recording_says_which_sites_read_what() -> None:
    model, uses = recorded(Holder)
    rules = policy(("hand:matmul", "bf16"), ("hand:mul", "fp16"), ("*", "fp32"))
    formats = {each.name: sorted(each.formats) for each in used_parameters(model, rules, uses)}
    assert formats == {
        "hand.weight": ["bf16"],
        "hand.scale": ["fp16"],
        "hand.child.weight": ["fp32"],
        "hand.child.bias": ["fp32"],
        "hand.rest.0": ["fp32"],
        "head.weight": ["fp32"],
        "head.bias": ["fp32"],
    }


def test_a_child_whose_weight_another_module_reads_is_no_unit() -> None:
    model, uses = recorded(Holder)
    rules = policy(("*:linear", "bf16"), ("hand.child", "fp16"), ("*", "fp32"))
    assert gathered(model, rules, uses) == {"hand": "fp32", "head": "bf16"}
    model, uses = recorded(Attention)
    rules = policy(("attention:linear#0", "fp32"), ("*", "bf16"))
    assert gathered(model, rules, uses) == {"attention": "fp32", "head": "bf16"}


def test_a_recording_makes_what_is_told_exact() -> None:
    model, uses = recorded(Attention)
    rules = policy(("attention:linear#1", "fp32"), ("*:softmax", "fp32"), ("*:linear", "bf16"), ("*", "fp32"))
    assert fsdp2_policies(model, rules, uses).unexpressed == (
        'parameter "attention.in_proj_weight" and 1 more: used in bf16 (attention:linear#0) and gathered in fp32, '
        "since FSDP2 gathers a module in one dtype",
        'rule "*" (fp32): it covers sites that read no parameters, as attention:scaled_dot_product_attention#0: '
        "they run in whatever dtype reaches them",
    )
    low = policy(("*:mean", "promote"), ("@loss:square", "bf16"), ("*", "fp32"))
    assert fsdp2_policies(model, low, uses).unexpressed == (
        'rule "*:mean" (promote): it has no counterpart: an export names dtypes',
        'rule "@loss:square" (bf16): it covers loss code, as @loss:square#0: that runs in the dtype of the model\'s '
        "outputs",
    )


def test_float8_is_for_linears_whose_own_forward_reads_the_weight() -> None:
    model, uses = recorded(Attention)
    rules = policy(("*:linear", "fp8_e4m3"), ("*", "fp32"))
    export = float8_module_filter(model, rules, uses)
    assert export.modules == ("head",)
    assert export.unexpressed[:2] == (
        'module "attention" asks for fp8_e4m3 and stays as it is: torchao exchanges nn.Linear and nothing else',
        'module "attention.out_proj" asks for fp8_e4m3 and stays as it is: its weight is read by attention:linear#1, '
        "not by its own forward, which is all that torchao exchanges",
    )


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(super().forward(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.scaled = nn.Embedding(16, 16), nn.Linear(16, 16), Scaled(16, 16)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.scaled(self.head(self.table(x.long()).sum(-2)))
        return y


def test_a_tied_table_and_a_forward_of_its_own_do_not_confuse_float8() -> None:
    model, uses = recorded(Model)
    export = float8_module_filter(model, policy(("*:linear", "fp8_e4m3"), ("*", "fp32")), uses)
    assert export.modules == ("head",)
    assert export.unexpressed[0] == (
        'module "scaled" asks for fp8_e4m3 and stays as it is: Scaled has a forward of its own, which torchao would '
        "drop"
    )


def test_loss_code_and_calls_that_no_policy_casts_choose_no_format() -> None:
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "ab": nn.Linear(16, 16)})
    watched, penalty = Site("ab", "mean", 0), Site("@loss", "square", 0)
    readers = (Site("a", "linear", 0), watched, penalty)
    uses = Uses(sites=readers, parameters={"a.weight": readers}, as_stored=frozenset({watched}))
    rules = policy(("a", "bf16"), ("@loss", "fp32"), ("*", "fp16"))
    weight = used_parameters(model, rules, uses)[0]
    assert (weight.sites, weight.formats, weight.home) == (readers[:2], {"bf16"}, "")
    alone = Uses(sites=(watched, penalty), parameters={}, as_stored=frozenset({watched}))
    assert fsdp2_policies(model, policy(("*", "bf16")), alone).unexpressed == (
        'rule "*" (bf16): it covers loss code, as @loss:square#0: that runs in the dtype of the model\'s outputs',
    )
    computed = Policy(name="c", rules=(Rule(sites="*", format="fp32"),), outputs="computed")
    assert len(fsdp2_policies(model, computed, alone).unexpressed) == 1
    apart = policy(("a", "bf16"), ("*", "fp32"))
    assert gathered(nn.Sequential(model["a"]), policy(("0", "bf16"), ("*", "fp32"))) == {"": "bf16"}
    assert gathered(model, apart) == {"a": "bf16", "ab": "fp32"}
