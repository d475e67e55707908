"""`compile: inductor`: the model is compiled in place and as it was before after `remove()`."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from autoprec.errors import ApplyError, TraceError
from autoprec.policy import Policy, Rule, preset
from autoprec.runtime import apply, compilation
from autoprec.runtime.checkpoint import policy_hash
from autoprec.runtime.compilation import compile_fault

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own

FP32 = replace(preset("fp32", "cpu"), compile="inductor")
LOW = Policy(
    name="low", rules=(Rule(sites="*:linear", format="bf16"), Rule(sites="*", format="fp32")), compile="inductor"
)
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Return what stands in for inductor: it counts the graphs and runs them as they are."""
    found, backends, real = CompileCounter(), [], torch.compile

    def compile_(function: Any, *, backend: str) -> Any:
        backends.append(backend)
        return real(function, backend=found)

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compilation, "compile_fault", lambda kind: None)
    yield found
    assert set(backends) == {"inductor"}
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", [FP32, LOW])
def test_the_model_is_compiled_whole_and_computes_the_same(policy: Policy, counter: CompileCounter) -> None:
    model, plain = net(), net()
    keys = list(model.state_dict())
    precision, eager = apply(model, policy), apply(plain, replace(policy, compile="as_given"))
    for _ in range(2):
        found, expected = model(X), plain(X)
        assert torch.equal(found, expected)
        precision.backward(found.sum())
        eager.backward(expected.sum())
    assert counter.frame_count == 1
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    assert list(model.state_dict()) == keys
    precision.remove()
    model(X)
    assert counter.frame_count == 1
    assert model._compiled_call_impl is None


def test_every_model_may_compile_however_many_came_before(counter: CompileCounter) -> None:
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        with apply(net(), LOW) as precision:
            precision.model(X)
    assert counter.frame_count == torch._dynamo.config.recompile_limit + 2


def test_a_deep_copy_is_compiled_too(counter: CompileCounter) -> None:
    model = net()
    apply(model, LOW)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    assert counter.frame_count == 2


def test_a_step_is_traced_as_it_is_written(counter: CompileCounter) -> None:
    precision = apply(net(), LOW)
    precision.model(X)
    trace = precision.trace(X)
    trace.check()
    assert [row.ran for row in trace.rows if row.site.op == "linear"] == [("bf16",)] * 2
    assert precision.find_overflow(X) is None
    assert counter.frame_count == 1


def test_modules_that_the_user_compiled_are_still_not_traced(counter: CompileCounter) -> None:
    precision = apply(net(), LOW)
    precision.model[0].compile(backend="inductor")
    with pytest.raises(TraceError, match="module 0 is compiled"):
        precision.trace(X)


def test_a_model_without_a_compiler_is_told_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = net()
    with pytest.raises(
        ApplyError, match=r'"low" has compile: inductor, and that lacks a C\+\+ compiler: CXX is .*as_given'
    ):
        apply(model, LOW)
    assert torch.equal(model(X), net()(X)), "nothing is left installed"


def test_what_inductor_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_fault("cpu") == "a C++ compiler: none of g++, clang++, c++ on the PATH"
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    monkeypatch.setattr(compilation.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert compile_fault("cpu") == f"Python.h, which is not in {tmp_path}: install python3-dev"
    (tmp_path / "Python.h").touch()
    assert compile_fault("cpu") is None
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    assert compile_fault("cuda") == "triton, which is not installed"
    assert compile_fault("mps") == "kernels that torch calls stable on mps"


def test_a_checkpoint_tells_compiled_training_apart_and_old_ones_are_read() -> None:
    assert policy_hash(LOW) != policy_hash(replace(LOW, compile="as_given"))


@pytest.mark.long
@pytest.mark.skipif(compile_fault("cpu") is not None, reason="no compiler")
def test_inductor_trains_as_eager_code_does() -> None:
    model, plain = net(), net()
    apply(model, FP32)
    for _ in range(2):
        assert torch.allclose(model(X), plain(X), atol=1e-6)
        model(X).sum().backward()
        plain(X).sum().backward()
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, atol=1e-5)


def test_an_exchanged_policy_is_compiled_as_it_says(counter: CompileCounter) -> None:
    model = net()
    precision = apply(model, LOW)
    model(X)
    precision.exchange(FP32)
    assert torch.equal(model(X), net()(X))
    assert counter.frame_count == 2
    precision.exchange(replace(FP32, compile="as_given"))
    model(X)
    assert counter.frame_count == 2
    assert model._compiled_call_impl is None
