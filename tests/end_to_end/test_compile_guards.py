"""What a compiled model that runs a policy is guarded by: all that can change, and nothing of autoprec's own code."""

import builtins
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import autoprec
from autoprec.policy import Policy, Rule
from tests.end_to_end.test_compile import pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Dynamo's own
    pytest.mark.skipif(importlib.util.find_spec("torch._dynamo") is None, reason="this torch has no Dynamo"),
]

LOW = Policy(name="low", rules=(Rule(sites="*:softmax", format="fp32"), Rule(sites="*", format="bf16")))
LINEAR = Policy(name="linear", rules=(Rule(sites="*:linear", format="bf16"), Rule(sites="*", format="as_given")))
HALF = Policy(name="half", rules=(Rule(sites="*", format="fp16"),))
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

SCALE = 2.0


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def chain() -> nn.Module:
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(8, 8), nn.ReLU())))


class Functional(nn.Module):
    """Calls of its own, with globals of this file, of torch and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.matrix = nn.Linear(8, 8), nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.gelu(self.one(x)) @ self.matrix * SCALE * divmod(7.0, 2.0)[0], dim=-1)


class Unnamed(Functional):
    """Begins with an op that computes in FP32 whatever comes: the cast mode looks into torch before this code does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.bfloat16()[:, :4].det())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0), nn.Softmax(-1))


def guards_in(model: Callable[..., Any], *, within: Any) -> list[tuple[str, str]]:
    """Return name and kind of each guard of a compiled model that runs in a context."""
    seen: list[tuple[str, str]] = []

    def keep(guards: Any) -> list[bool]:
        seen.extend((each.name, each.guard_type) for each in guards)
        return [True] * len(guards)

    compiled = torch.compile(model, backend="eager", options={"guard_filter_fn": keep})
    with within:
        compiled(X)
    return seen


def guards_of(module: str, guards: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those on one module, those on its class left out."""
    mark = f"_modules['{module}']"
    parts = ((name.partition(mark)[2], kind) for name, kind in guards if mark in name)
    return sorted((part, kind) for part, kind in parts if not part.startswith(")"))


@pytest.mark.parametrize("module", ["2", "3"])
def test_a_leaf_is_guarded_by_its_method_and_by_what_autocast_guards(module: str) -> None:
    theirs = guards_of(module, guards_in(chain(), within=torch.autocast("cpu", torch.bfloat16)))
    torch._dynamo.reset()
    model = chain()
    ours = guards_of(module, guards_in(model, within=autoprec.apply(model, LOW).loss()))
    absent = ("", "NOT_PRESENT_IN_GENERIC_DICT")
    assert absent in theirs, "torch's own look for a `forward` in the instance, for which ours stands"
    assert set(ours) - {each for each in theirs if each != absent} == {(".forward", "ID_MATCH")}


@pytest.mark.parametrize("within_loss", [True, False])
@pytest.mark.parametrize("build", [chain, Functional, normed])
def test_autoprec_s_own_code_is_not_guarded(build: Callable[[], nn.Module], *, within_loss: bool) -> None:
    model = build()
    precision = autoprec.apply(model, LOW)
    guards = guards_in(model, within=precision.loss() if within_loss else torch.enable_grad())
    assert any("RUNNING" in name for name, _ in guards)
    ours = ("__import_autoprec", "G['in_frame']", "G['traced_action']", "G['original_forward']", "mode.enter")
    assert not [name for name, _ in guards if any(each in name for each in ours)]
    assert not [name for name, _ in guards if "__mro__" in name and "RUNNING" in name]
    assert not [name for name, kind in guards if kind == "DUPLICATE_INPUT" and ("RUNNING" in name or "stack" in name)]


@pytest.mark.parametrize("build", [Functional, Unnamed])
def test_what_the_code_of_a_model_reads_is_guarded_as_without_a_policy(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = pair(build, LINEAR)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert torch.equal(compiled(X), twin(X))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert torch.equal(compiled(X), twin(X))
    monkeypatch.setattr(F, "gelu", torch.tanh)
    assert torch.equal(compiled(X), twin(X))
    monkeypatch.setattr(torch, "softmax", torch.log_softmax)
    assert torch.equal(compiled(X), twin(X))
    monkeypatch.setattr(builtins, "divmod", lambda *_: (5.0, 0.0))
    assert torch.equal(compiled(X), twin(X))
    assert counter.frame_count == 5


def test_what_the_caller_of_a_model_reads_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = pair(chain, LOW)
    compiled = torch.compile(lambda x: model(x) * SCALE, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), twin(X) * 2.0)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert torch.equal(compiled(X), twin(X) * 3.0)


def test_a_function_of_the_loss_code_follows_the_policy_that_runs() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    low, half = autoprec.apply(chain(), LOW), autoprec.apply(chain(), HALF)
    for _ in range(2):
        for precision, dtype in ((low, torch.bfloat16), (half, torch.float16)):
            with precision.loss():
                assert compiled(X).dtype == dtype
        assert compiled(X).dtype == torch.float32
    with low.loss():
        model = chain()
        with autoprec.apply(model, HALF).loss():
            assert compiled(X).dtype == torch.float16
        assert compiled(X).dtype == torch.bfloat16


def test_a_function_follows_the_module_that_calls_it() -> None:
    compiled = torch.compile(lambda x: x * 1.5, backend="eager", fullgraph=True)

    class Calling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compiled(x)

    rules = (Rule(sites="1:mul", format="fp16"), Rule(sites="*", format="bf16"))
    model = nn.Sequential(Calling(), Calling(), Calling())
    autoprec.apply(model, Policy(name="test", rules=rules, outputs="computed"))
    low = X.bfloat16() * 1.5
    for _ in range(2):
        assert torch.equal(model(X), (low.half() * 1.5).bfloat16() * 1.5)


def test_a_compiled_model_sees_that_the_forward_of_a_leaf_was_exchanged() -> None:
    model, twin = pair(chain, LOW)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), twin(X))
    for each in (model, twin):
        each.get_submodule("2").forward = torch.neg
    assert torch.equal(compiled(X), twin(X))


def test_a_compiled_model_sees_that_a_leaf_was_exchanged() -> None:
    model, twin = pair(chain, LOW)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), twin(X))
    fresh = nn.Linear(8, 8)
    for each in (model, twin):
        setattr(each, "2", fresh)
    assert torch.equal(compiled(X), twin(X))
