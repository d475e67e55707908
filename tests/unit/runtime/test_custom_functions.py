"""Custom autograd Functions: what they run inside is the author's, in training, in evaluation and compiled."""

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.policy import Policy, Rule
from autoprec.runtime import apply

BF16 = Policy(name="test", rules=(Rule(sites="*", format="bf16"),), outputs="computed")
SEEN: list[torch.dtype] = []


class Noted(torch.autograd.Function):
    """Notes the dtype that its own code computes in, and runs a module."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        SEEN.append((x * 2).dtype)
        SEEN.append(module(x).dtype)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2, None


class Calls(nn.Module):
    """Calls a Function, and goes on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Noted.apply(x, self.inner)
        return y * 1


class Turning(Calls):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.parametrize("kind", [Calls, Turning])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_its_code_is_left_alone_and_modules_it_calls_are_cast(kind: type[Calls], context: Any) -> None:
    SEEN.clear()
    model = kind()
    apply(model, BF16)
    with context():
        assert model(torch.ones(2, 4, requires_grad=True)).dtype == torch.bfloat16
    assert [torch.float32, torch.bfloat16] == SEEN


def test_an_exception_inside_leaves_the_next_call_right() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("inside")

    class Catches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ValueError, match="inside"):
                Breaks.apply(x)
            return x * 1

    model = Catches()
    apply(model, BF16)
    with torch.no_grad():
        assert model(torch.ones(2)).dtype == torch.bfloat16


class Waves(torch.autograd.Function):
    """Has ops in both directions, and a module, whose results tell FP32 from bf16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1.1 + torch.sin(x) + module(x) * 64

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 1.1 + torch.cos(x) * gradients[0], None


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Linear(4, 4), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Waves.apply(self.enter(x).float(), self.inner)
        return (y * 1) * x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile makes one
@pytest.mark.parametrize(
    "rules",
    [
        BF16,
        Policy(name="second", rules=(Rule(sites=":mul#2", format="fp16"), Rule(sites="*", format="bf16"))),
    ],
    ids=lambda rules: rules.name,
)
def test_compiled_whole_it_computes_what_it_does_in_eager_code(rules: Policy) -> None:
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Compiled()
        apply(model, rules)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        output = call(x)
        output.float().square().sum().backward()
        with torch.no_grad():
            found.append((output, call(x), x.grad, model.enter.weight.grad))
    for eager, compiled in zip(*found, strict=True):
        assert eager is not None
        assert torch.equal(eager, compiled)
