"""FP8 sites: bit for bit what their definition gives, and refused where it cannot be had."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoprec.errors import ApplyError, FormatError
from autoprec.policy import Float8, Policy, Rule, Scaling
from autoprec.runtime import apply
from autoprec.runtime.device import describe
from autoprec.runtime.load_torchao import load_torchao
from autoprec.runtime.rounding import round_to

SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise")
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


def fp8(sites: str = "*:linear", scaling: Scaling = "tensorwise", rest: str = "as_given") -> Policy:
    rules = (Rule(sites=sites, format="fp8_e4m3"), Rule(sites="*", format=rest))
    return Policy(name="fp8", rules=rules, float8=Float8(scaling=scaling), outputs="computed")


def rounded(tensor: Tensor, name: str, scaling: Scaling, summed: int) -> Tensor:
    """Return `tensor` scaled, rounded to the format and scaled back; `summed` is the dimension a product sums over."""
    magnitude = tensor.detach().abs().double()
    largest = magnitude.amax(summed, keepdim=True) if scaling == "rowwise" else magnitude.max()
    scale = (LARGEST[name] / largest.clamp(min=1e-12)).float()
    if scaling == "rowwise":
        scale = scale.log2().floor().exp2()
    return round_to(tensor.detach().float() * scale, name, saturate=True) / scale


def reference(x: Tensor, weight: Tensor, grad: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product and the gradients of rows and weight, of matrices in bf16, bf16 and any dtype."""
    gradients = "fp8_e4m3" if scaling == "rowwise" else "fp8_e5m2"

    def low(tensor: Tensor, summed: int) -> Tensor:
        return rounded(tensor, "fp8_e4m3", scaling, summed)

    y = (low(x, -1) @ low(weight.t(), 0)).bfloat16()
    grad_x = (rounded(grad, gradients, scaling, -1) @ low(weight.t(), -1).t()).bfloat16()
    grad_w = (rounded(grad, gradients, scaling, 0).t() @ low(x, 0)).bfloat16().to(weight.dtype)
    return y, grad_x, grad_w


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(8, 32), (2, 3, 32), (32,)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_linear_layer_and_its_gradients_equal_the_definition(
    scaling: Scaling, shape: tuple[int, ...], given: torch.dtype
) -> None:
    layer = nn.Linear(32, 16)
    x = torch.randn(shape).to(given).requires_grad_()
    grad = torch.randn(*shape[:-1], 16).bfloat16()
    flat = (x.detach().bfloat16().reshape(-1, 32), layer.weight, grad.reshape(-1, 16))
    y, grad_x, grad_w = reference(*flat, scaling)
    assert layer.bias is not None
    with apply(layer, fp8(scaling=scaling)):
        result = layer(x)
        result.backward(grad)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, (y + layer.bias.bfloat16()).reshape(result.shape))
    assert x.grad is not None
    assert x.grad.dtype == given
    assert torch.equal(x.grad, grad_x.reshape(shape).to(given))
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, grad_w)
    assert not torch.equal(result, F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_model_equals_the_one_that_torchao_converts(scaling: Scaling) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).bfloat16()

    torchao = load_torchao("torchao.float8", "this test")
    config = replace(torchao.Float8LinearConfig.from_recipe_name(scaling), emulate=True)
    theirs, ours = torchao.convert_to_float8_training(model(), config=config), model()
    x = torch.randn(16, 32).bfloat16()
    theirs(x).float().square().sum().backward()
    with apply(ours, fp8(scaling=scaling)):
        ours(x).float().square().sum().backward()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
    assert len(pairs) == 4
    assert [type(each) for each in ours] == [nn.Linear, nn.GELU, nn.Linear]  # type: ignore[attr-defined]


class Calls(nn.Module):
    """Runs one functional call on its input and its matrix."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.matrix, self.bias = call, nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.matrix, self.bias)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "@": lambda x, m, _: x @ m,
    "torch.matmul": lambda x, m, _: torch.matmul(input=x, other=m),
    "method": lambda x, m, _: x.matmul(m),
    "__rmatmul__": lambda x, m, _: m.__rmatmul__(x),
    "mm": lambda x, m, _: torch.mm(x, mat2=m),
    "addmm": lambda x, m, b: torch.addmm(b, x, m),
    "addmm by name": lambda x, m, b: torch.addmm(input=b, mat1=x, mat2=m),
    "linear by name": lambda x, m, b: F.linear(bias=b, weight=m.t(), input=x),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_every_spelling_of_a_product(name: str) -> None:
    model = Calls(CALLS[name])
    x = torch.randn(4, 32)
    y, _, grad_m = reference(x.bfloat16(), model.matrix.t(), torch.ones(4, 16).bfloat16(), "tensorwise")
    expected = y + model.bias.bfloat16() if name.startswith(("addmm", "linear")) else y
    op = {"mm": "mm", "addmm": "addmm", "addmm by name": "addmm", "linear by name": "linear"}.get(name, "matmul")
    with apply(model, fp8(f"*:{op}")):
        result = model(x)
        result.sum().backward()
    assert torch.equal(result, expected)
    assert model.matrix.grad is not None
    assert torch.equal(model.matrix.grad, grad_m.t())


def test_fp16_activations_stay_fp16() -> None:
    layer = nn.Linear(32, 16, bias=False)
    x = torch.randn(4, 32).half()
    with apply(layer, fp8()):
        assert layer(x).dtype == torch.float16


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rows_give_no_rows_and_zero_gradients(scaling: Scaling) -> None:
    layer = nn.Linear(32, 16)
    with apply(layer, fp8(scaling=scaling)):
        result = layer(torch.zeros(0, 32))
        result.sum().backward()
    assert result.shape == (0, 16)
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda y: f(y).float().sum())(x),
        lambda f, x: torch.func.vmap(lambda row: f(row[None]))(x),
        lambda f, x: torch.func.jacrev(f)(x),
    ],
    ids=["grad", "vmap", "jacrev"],
)
def test_transforms_of_torch_func_are_refused(transform: Callable[[nn.Module, Tensor], Any]) -> None:
    layer = nn.Linear(32, 16)
    apply(layer, fp8())
    with pytest.raises(ApplyError, match=r'site ":linear#0" runs in fp8_e4m3 inside a transform of torch.func'):
        transform(layer, torch.randn(16, 32))


def test_double_is_left_alone() -> None:
    layer = nn.Linear(32, 16).double()
    x = torch.randn(4, 32).double()
    expected = layer(x)
    with apply(layer, fp8()):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_zeros_stay_zeros_and_what_is_not_finite_shows(value: float) -> None:
    layer = nn.Linear(32, 16, bias=False)
    with apply(layer, fp8()):
        result = layer(torch.full((4, 32), value))
    assert not result.any() if value == 0 else bool(result.isnan().all())


def test_checkpointing_and_accumulation_change_no_gradient() -> None:
    def gradients(run: Callable[[nn.Module, Tensor], Tensor], parts: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        x = torch.randn(8, 32)
        with apply(model, fp8(rest="bf16")):
            for _ in range(parts):
                run(model, x).float().square().sum().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    plain = gradients(lambda model, x: model(x), 1)
    for reentrant in (False, True):
        again = gradients(
            lambda model, x, kind=reentrant: checkpoint(model, x.requires_grad_(), use_reentrant=kind),  # type: ignore[misc]
            1,
        )
        assert all(map(torch.equal, again, plain))
    twice = gradients(lambda model, x: model(x), 2)
    assert all(torch.equal(two, 2 * one) for two, one in zip(twice, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling", [SCALINGS[0], *(pytest.param(each, marks=pytest.mark.long) for each in SCALINGS[1:])]
)
def test_compiled_without_a_graph_break_it_gives_the_same_bits(scaling: Scaling) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(8, 32)
    with apply(model, fp8(scaling=scaling, rest="bf16")):
        eager = model(x)
        expected = torch.autograd.grad(eager.float().sum(), list(model.parameters()))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(compiled, eager)
        assert all(map(torch.equal, torch.autograd.grad(compiled.float().sum(), list(model.parameters())), expected))


def refused(model: nn.Module, policy: Policy, x: Tensor, fault: str) -> None:
    with apply(model, policy), pytest.raises(FormatError, match=re.escape(fault)):
        model(x)


def test_shapes_that_kernels_do_not_take_are_refused_at_the_first_call_where_it_is_emulated_too() -> None:
    head = nn.Sequential(nn.Linear(32, 10))
    message = 'site "0:linear#0" cannot run in fp8_e4m3: (4, 32) by (10, 32): 10 not a multiple of 16; give it another '
    refused(head, fp8(), torch.ones(4, 32), message + 'format by a rule above: {sites: "0:linear", format: bf16}')
    batches = Calls(lambda x, m, _: x.expand(2, 4, 32) @ m.expand(2, 32, 16))
    refused(batches, fp8("*:matmul"), torch.ones(4, 32), "the second operand must be a matrix")


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda x, m, _: torch.mm(x, m.detach(), out=torch.empty(4, 16)), "writes its result to a tensor"),
        (lambda x, m, _: torch.zeros(4, 16).addmm_(x, m), "writes its result to a tensor"),
        (lambda x, m, b: torch.addmm(b, x, m, alpha=2), "addmm has alpha or beta other than 1"),
    ],
)
def test_calls_that_are_no_plain_product_are_refused(call: Any, fault: str) -> None:
    policy = Policy(name="p", rules=(*fp8("*:mm").rules[:1], *fp8("*:addmm").rules))
    refused(Calls(call), policy, torch.ones(4, 32), fault)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    layer = nn.Linear(32, 16)
    x = torch.randn(4, 32, requires_grad=True)
    message = (
        r'site ":linear#0" runs in fp8_e4m3, and backward was called with create_graph=True.*leave create_graph out'
    )
    with apply(layer, fp8()), pytest.raises(ApplyError, match=message):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_without_torchao_apply_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8.float8_linear", None)
    with pytest.raises(ApplyError, match=r"a rule with format fp8_e4m3 needs torchao.*pip install torchao"):
        apply(nn.Linear(32, 16), fp8())


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [64, 37])
def test_kernels_agree_with_emulation(scaling: Scaling, rows: int) -> None:
    """Both sum the same products of FP8 numbers, which are exact in FP32: only accumulation and rounding differ.

    FP8 tensor cores accumulate with at least 13 fraction bits (fast accumulation; Hopper keeps 14 bits of the addends
    within an MMA), so a sum of K terms is off by up to K * 2^-13 of the sum of magnitudes; the result is then rounded
    to bf16, which is off by 2^-8 of it on each side.
    """
    if "fp8_e4m3" not in describe("cuda").formats:
        pytest.skip("this GPU has no FP8 kernels")
    torch.manual_seed(0)
    layer = nn.Linear(64, 32, bias=False).cuda()
    x = torch.randn(rows, 64, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(rows, 32, device="cuda").bfloat16()
    expected = reference(x.detach().cpu(), layer.weight.detach().cpu(), grad.cpu(), scaling)
    with apply(layer, fp8(scaling=scaling)):
        result = layer(x)
        result.backward(grad)
    a, w, g = (each.detach().float().cpu().abs() for each in (x, layer.weight, grad))
    magnitudes = ((a @ w.t(), 64), (g @ w, 32), (g.t() @ a, rows))
    # The rounded magnitudes are at most (1 + 2^-4)(1 + 2^-3) of the given ones.
    for ours, theirs, (magnitude, terms) in zip((result, x.grad, layer.weight.grad), expected, magnitudes, strict=True):
        assert ours is not None
        bound = 1.2 * magnitude * terms * 2.0**-13 + 2.0**-7 * theirs.float().abs() + 2.0**-7 * magnitude * 2.0**-8
        assert bool(((ours.float().cpu() - theirs.float()).abs() <= bound).all())
