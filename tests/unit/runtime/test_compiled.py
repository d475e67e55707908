"""A compiled model inside the loss block: its graph holds the casts, and nobody casts while it runs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.overrides import TorchFunctionMode

from autoprec.policy import Policy, Rule
from autoprec.runtime import apply

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own

X = torch.linspace(-1, 1, 12).reshape(3, 4)
FP32_LOSS = Policy(
    name="test", rules=(Rule(sites="@loss", format="fp32"), Rule(sites="*", format="bf16")), outputs="computed"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.matrix = nn.Linear(4, 4), nn.Parameter(torch.eye(4) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.softmax(self.linear(x) @ self.matrix, dim=-1)
        return y


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_graph_is_not_cast_as_loss_code(backend: str) -> None:
    model, compiled = Net(), Net()
    precision, other = apply(model, FP32_LOSS), apply(compiled, FP32_LOSS)
    run: Any = torch.compile(compiled, backend=backend, fullgraph=True)
    for _ in range(2):
        with precision.loss():
            expected = model(X)
        with other.loss():
            found = run(X)
            assert (found * 1.0).dtype == torch.float32, "the loss code goes on being cast"
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        expected.float().square().sum().backward()
        found.float().square().sum().backward()
    assert torch.equal(model.linear.weight.grad, compiled.linear.weight.grad)  # type: ignore[arg-type]


def test_a_compiled_teacher_runs_in_the_loss_block_of_its_student() -> None:
    teacher, student = Net(), Net()
    apply(teacher, FP32_LOSS)
    precision = apply(student, Policy(name="student", rules=(Rule(sites="*", format="fp16"),)))
    expected = teacher(X)
    run: Any = torch.compile(teacher, backend="aot_eager")
    for _ in range(2):
        with precision.loss():
            found = run(X)
            assert (X * 1.0).dtype == torch.float16
        assert torch.equal(found, expected)


def test_the_modes_of_others_stay_where_they_are() -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    model = Net()
    precision = apply(model, FP32_LOSS)
    expected = model(X)
    run: Any = torch.compile(model, backend="aot_eager")
    with Counting():
        for _ in range(2):
            with precision.loss():
                assert torch.equal(run(X), expected)
        before = Counting.calls
        _ = X * 2
        assert Counting.calls == before + 1


def test_new_calls_in_the_loss_code_do_not_compile_the_model_again() -> None:
    model = Net()
    precision = apply(model, FP32_LOSS)
    counter = CompileCounterWithBackend("eager")
    run: Any = torch.compile(model, backend=counter)
    with precision.loss():
        loss = run(X).sum()
        _ = nn.functional.linear(X, model.linear.weight)
        for other in (torch.exp, torch.sin, torch.Tensor.t, torch.relu):
            loss = loss + other(run(X)).sum()  # type: ignore[operator]
    assert counter.frame_count == 1


def test_a_module_with_a_backward_hook_runs_between_graphs() -> None:
    seen: list[torch.dtype] = []
    model, compiled = Net(), Net()
    precision, other = apply(model, FP32_LOSS), apply(compiled, FP32_LOSS)
    compiled.linear.register_full_backward_hook(lambda _, __, gradients: seen.append(gradients[0].dtype))
    run: Any = torch.compile(compiled, backend="eager")
    with precision.loss():
        model(X).square().sum().backward()
    with other.loss():
        run(X).square().sum().backward()
    assert seen == [torch.bfloat16]
    assert torch.equal(model.linear.weight.grad, compiled.linear.weight.grad)  # type: ignore[arg-type]


def test_the_mode_itself_is_not_compiled_between_graphs() -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            torch._dynamo.graph_break()
            return torch.softmax(y @ self.matrix, dim=-1)

    counts = []
    for is_applied in (False, True):
        torch._dynamo.reset()
        model, counter = Broken(), CompileCounterWithBackend("eager")
        if is_applied:
            apply(model, FP32_LOSS)
        torch.compile(model, backend=counter)(X).sum().backward()
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0]


def test_each_of_many_blocks_may_be_compiled_alone() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + self.linear(x)
            return y

    torch._dynamo.reset()
    model = nn.Sequential(*(Block() for _ in range(torch._dynamo.config.recompile_limit + 4)))
    apply(model, FP32_LOSS)
    expected = model(X)
    counter = CompileCounter()
    for block in model:
        block.compile(backend=counter)
    for _ in range(2):
        assert torch.equal(model(X), expected)
    assert counter.frame_count == len(model)
