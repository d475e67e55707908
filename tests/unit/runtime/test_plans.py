"""Plans: custom ops that write, functions made anew, and calls that need more than a cast, or less."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from autoprec.policy import Policy, Rule
from autoprec.runtime import apply
from autoprec.runtime import calls as calls_module
from autoprec.runtime.calls import MOST_FUNCTIONS

BF16 = Policy(name="test", rules=(Rule(sites="*", format="bf16"),), outputs="computed")


@torch.library.custom_op("autoprec_tests::double_into", mutates_args={"out"})
def double_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@torch.library.custom_op("autoprec_tests::mul", mutates_args={"y"})
def mul(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x * 2)


class Writing(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outs = [torch.zeros(3) for _ in range(4)]
        double_into(x, outs[0])
        torch.ops.autoprec_tests.double_into(x, out=outs[1])
        mul(x, outs[2])
        torch.ops.autoprec_tests.mul(x, outs[3])
        return outs


def test_what_a_custom_op_writes_to_is_not_cast() -> None:
    model = Writing()
    apply(model, BF16)
    for out in model(torch.ones(3)):
        assert torch.equal(out, torch.full((3,), 2.0))


def test_custom_functions_made_at_each_call_do_not_pile_up() -> None:
    precision = apply(nn.Linear(2, 2), BF16)

    def made_anew() -> Any:
        return lambda _: None

    with precision.loss():
        for _ in range(MOST_FUNCTIONS + 10):
            x = torch.ones(1)
            handle_torch_function(made_anew(), (x,), x)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    plans = precision.plans_of("@loss")
    assert len(plans.plans) <= MOST_FUNCTIONS
    assert len(plans.idle) <= MOST_FUNCTIONS
    assert len(calls_module._CALLS) <= MOST_FUNCTIONS


AS_GIVEN = Policy(
    name="as given", rules=(Rule(sites=":mul", format="bf16"), Rule(sites="*", format="as_given")), outputs="computed"
)
FP32 = Policy(
    name="fp32", rules=(Rule(sites=":mul", format="bf16"), Rule(sites="*", format="fp32")), outputs="computed"
)
X = torch.linspace(0.1, 1, 9).reshape(3, 3)


class Mixing(nn.Module):
    """Hands a call an FP32 tensor and a lowered one."""

    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x, x * 1)


@pytest.mark.parametrize("rules", [AS_GIVEN, FP32], ids=lambda rules: rules.name)
@pytest.mark.parametrize(
    "call",
    [
        lambda x, low: torch.meshgrid(x[0], low[0], indexing="ij"),
        lambda x, low: torch.cartesian_prod(x[0], low[0]),
        lambda x, low: torch.histogram(low, bins=x[0]),
        lambda x, low: torch.linalg.vander(low),
        lambda x, low: torch.sparse.mm(x.to_sparse(), low),
        lambda x, low: torch.sparse.addmm(low, x.to_sparse(), low),
        lambda x, low: torch.linalg.vector_norm(low, dtype=low.dtype) + torch.linalg.norm(low, dtype=low.dtype),
        lambda x, low: torch.fft.rfft(low, norm="ortho"),
        lambda x, low: torch.linalg.solve(x + torch.eye(3), low),
    ],
    ids=["meshgrid", "product", "histogram", "vander", "sparse mm", "sparse addmm", "norm", "fft", "solve"],
)
def test_lowered_neighbors_make_nothing_fail(call: Any, rules: Policy) -> None:
    model = Mixing(call)
    apply(model, rules)
    model(X)


def test_left_alone_code_gets_the_one_format_that_its_kernel_takes() -> None:
    def inverse(x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.linalg.inv(low + torch.eye(3, dtype=low.dtype))

    model = Mixing(inverse)
    precision = apply(model, AS_GIVEN)
    assert model(X.clone().requires_grad_()).dtype == torch.float32
    precision.trace(X.clone().requires_grad_(), loss=lambda model, x: model(x).sum() + x.sum()).check()


def test_an_embedding_with_sparse_gradients_trains() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    apply(model, BF16)
    model(torch.tensor([1, 2])).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch writes jvp rules in it
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # slower, and right
@pytest.mark.parametrize("norm", ["layer_norm", "group_norm", "rms_norm"])
def test_transforms_differentiate_norms_whose_parameters_are_wider(norm: str) -> None:
    weight, bias, matrix = torch.linspace(0.5, 1.5, 4), torch.linspace(-1, 1, 4), torch.eye(4)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "layer_norm": lambda x, w: F.layer_norm(x, (4,), w, bias),
        "group_norm": lambda x, w: F.group_norm(x, 2, w, bias),
        "rms_norm": lambda x, w: F.rms_norm(x, (4,), w),
    }

    class Normed(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return calls[norm](x * w, w) @ matrix

    model = Normed()
    apply(model, BF16)
    rows = torch.linspace(-1, 1, 12).reshape(3, 4)
    plain = model(rows, weight)
    with forward_ad.dual_level():
        dual = model(forward_ad.make_dual(rows, torch.ones(3, 4)), weight)
        assert forward_ad.unpack_dual(dual).tangent is not None
    transformed = torch.func.vmap(lambda row: model(row[None], weight)[0])(rows)
    for output in (forward_ad.unpack_dual(dual).primal, transformed):
        assert output.dtype == torch.bfloat16
        # The kernel and its parts may differ in the last bit of FP32, and after rounding by one ulp of bf16.
        torch.testing.assert_close(output, plain, rtol=2**-7, atol=2**-8)

    def gradient_of(row: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.grad(lambda w: model(row[None], w).float().square().sum())(weight)
        return found

    each = torch.func.vmap(gradient_of)(rows)
    assert each.dtype == torch.float32
    torch.testing.assert_close(each[1], gradient_of(rows[1]), rtol=2**-5, atol=2**-6)
