"""Plans are made for each torch function once, without end: custom ops that write, and functions made anew."""

from typing import Any

import torch
from torch import nn
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


def test_functions_made_at_each_call_do_not_pile_up() -> None:
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
