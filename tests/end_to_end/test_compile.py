"""A policy under torch.compile: the compiled model is the applied one, with no break or recompilation of ours."""

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoprec
from autoprec.errors import ApplyError
from autoprec.policy import Policy, Rule
from tests.tiny_models import MODELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Dynamo's and inductor's own
    pytest.mark.skipif(importlib.util.find_spec("torch._dynamo") is None, reason="this torch has no Dynamo"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # another kernel, which eager evaluation alone would take
    yield
    torch.backends.mha.set_fastpath_enabled(fast)
    torch._dynamo.reset()


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules), **settings)


MIXED = policy(("*:softmax", "fp32"), ("*:gelu", "fp16"), ("*:layer_norm", "fp32"), ("*", "bf16"))
BY_INDEX = policy((":mul#1", "fp16"), (":mul", "bf16"), ("*", "as_given"), outputs="computed")


class MLP(nn.Module):
    """Module sites, functional sites told apart by their index, and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.one(x)) * 0.5
        x = self.two(input=self.norm(x)) * 1.5
        y: torch.Tensor = self.three(torch.softmax(x, dim=-1))
        return y


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.relu(self.norm(self.enter(x)), inplace=True).mean((2, 3)))
        return y


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (MLP, (4, 8)),
    "CNN": (CNN, (2, 1, 8, 8)),
    "encoder": (encoder, (2, 4, 8)),
}
TRANSFORMERS = ("GPT-2", "BERT", "Llama", "ViT")
BACKENDS = ("eager", "aot_eager")


def random_input(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(
    model: nn.Module, compiled: Callable[..., torch.Tensor], shape: tuple[int, ...], num_steps: int = 2
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the outputs of training steps and of an evaluation after them, and the state and gradients."""
    outputs = []
    for step in range(num_steps):
        model.zero_grad()
        y = compiled(random_input(shape, step))
        y.float().square().mean().backward()
        outputs.append(y.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    model.eval()
    with torch.no_grad():
        outputs.append(compiled(random_input(shape, 9)))
    model.train()
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outputs, {**{name: value.clone() for name, value in model.state_dict().items()}, **gradients}


def pair(build: Callable[[], nn.Module], rules: Policy | str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build()
    twin = copy.deepcopy(model)
    autoprec.apply(model, rules)
    autoprec.apply(twin, rules)
    return model, twin


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    (outputs, state), (wanted_outputs, wanted) = ours, theirs
    assert state.keys() == wanted.keys()
    tensors = dict(enumerate(outputs)) | state
    for key, reference in (dict(enumerate(wanted_outputs)) | wanted).items():
        assert tensors[key].dtype == reference.dtype, key
        if tolerance == 0:
            assert torch.equal(tensors[key], reference), key
        else:
            assert (tensors[key] - reference).abs().max() <= tolerance * (reference.abs().max() + 1e-2), key


@pytest.mark.parametrize(
    ("rules", "backend"),
    [
        pytest.param(MIXED, "eager", id="mixed-eager"),
        pytest.param(MIXED, "aot_eager", id="mixed-aot_eager"),
        pytest.param("autocast-bf16", "eager", id="bf16-eager"),
        pytest.param("autocast-bf16", "aot_eager", id="bf16-aot_eager", marks=pytest.mark.long),
        pytest.param("autocast-fp16", "eager", id="fp16-eager", marks=pytest.mark.long),
        pytest.param("autocast-fp16", "aot_eager", id="fp16-aot_eager", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long if each == "encoder" else ()) for each in ARCHITECTURES]
)
def test_compiled_fullgraph_is_the_applied_model(name: str, rules: Policy | str, backend: str) -> None:
    build, shape = ARCHITECTURES[name]
    model, twin = pair(build, rules)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    # aot_eager runs the same kernels after decomposition of a few ops into others: a few roundings of a low format.
    assert_close(steps(model, compiled, shape), steps(twin, twin, shape), 0 if backend == "eager" else 2**-6)


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), [("MLP", "as_given"), ("CNN", "as_given"), ("CNN", "channels_last")])
def test_inductor_is_the_applied_model(name: str, layout: Literal["as_given", "channels_last"]) -> None:
    build, shape = ARCHITECTURES[name]
    model, twin = pair(build, replace(MIXED, memory_format=layout))
    layouts = [p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4]
    assert layouts == [layout == "channels_last" or p.shape[1] == 1 for p in model.parameters() if p.dim() == 4]
    compiled = torch.compile(model, fullgraph=True)
    # inductor keeps fused intermediates in FP32 where eager rounds each of them to a low format.
    assert_close(steps(model, compiled, shape), steps(twin, twin, shape), 2**-5)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_compile_fullgraph(name: str, backend: str) -> None:
    build, batch = MODELS[name]()
    batch.pop("labels")  # transformers logs a warning on the way to its loss, which is a break of its own
    # Tied weights are cast once an eager forward and once a use in a graph, and their gradients added accordingly.
    rules = policy(("*:embedding", "as_given"), *((rule.sites, rule.format) for rule in MIXED.rules))
    model, twin = pair(lambda: build().eval(), rules)
    losses = []
    for each in (model, twin):
        call = torch.compile(each, fullgraph=True, backend=backend) if each is model else each
        loss = call(**batch).logits.square().mean()
        loss.backward()
        losses.append(loss.detach())
    assert_close(
        ([losses[0]], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}),
        ([losses[1]], {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}),
        0 if backend == "eager" else 2**-5,
    )


def breaks(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    torch._dynamo.reset()
    count = torch._dynamo.explain(model)(*args, **kwargs).graph_break_count
    torch._dynamo.reset()
    return int(count)


@pytest.mark.long
@pytest.mark.parametrize("name", ["T5", "Mixtral", "CNN"])
def test_a_policy_adds_no_graph_break(name: str) -> None:
    build, batch = MODELS[name]()
    model = build()
    without = breaks(model, **batch)
    autoprec.apply(model, MIXED)
    assert breaks(model, **batch) == without


def test_steps_recompile_nothing() -> None:
    model, _ = pair(MLP, MIXED)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        compiled(random_input((4, 8), step)).square().mean().backward()
        optimizer.step()
        if step == 0:
            first = counter.frame_count
    assert counter.frame_count == first == 1


@pytest.mark.parametrize("dynamic", [True, None])
def test_other_batch_sizes_are_one_dynamic_graph(*, dynamic: bool | None) -> None:
    model, twin = pair(MLP, MIXED)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    for rows in (4, 6, 8, 10):
        assert torch.equal(compiled(random_input((rows, 8))), twin(random_input((rows, 8))))
    assert counter.frame_count == (1 if dynamic else 2)


def test_indices_are_counted_in_the_graph() -> None:
    class Products(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 1.1, x * 1.2, x * 1.3

    model, twin = pair(Products, BY_INDEX)
    x = random_input((3,))
    ours = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert [y.dtype for y in ours] == [torch.bfloat16, torch.float16, torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(ours, twin(x), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_compile_works_on_an_applied_model(backend: str) -> None:
    model, twin = pair(MLP, MIXED)
    model.compile(backend=backend, fullgraph=True)
    assert_close(steps(model, model, (4, 8)), steps(twin, twin, (4, 8)), 0 if backend == "eager" else 2**-6)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_submodule_may_be_compiled_alone(backend: str) -> None:
    model, twin = pair(encoder, MIXED)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    assert_close(steps(model, model, (2, 4, 8)), steps(twin, twin, (2, 4, 8)), 0 if backend == "eager" else 2**-6)


LOSS_RULES = policy(("@loss:mse_loss", "fp32"), ("@loss:mul", "fp16"), ("*", "bf16"), outputs="computed")


@pytest.mark.parametrize(
    ("backend", "holds_model"),
    [
        ("eager", True),
        ("aot_eager", False),
        pytest.param("eager", False, marks=pytest.mark.long),
        pytest.param("aot_eager", True, marks=pytest.mark.long),
    ],
)
def test_a_compiled_step_function_with_loss_code(backend: str, holds_model: bool) -> None:
    results = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = MLP()
        precision = autoprec.apply(model, LOSS_RULES)

        def step(x: torch.Tensor, model: nn.Module = model, precision: Any = precision) -> tuple[torch.Tensor, ...]:
            if holds_model:
                with precision.loss():
                    y = model(x)
                    return F.mse_loss(y, x), y * 2
            y = model(x)
            with precision.loss():
                return F.mse_loss(y, x), y * 2

        call = torch.compile(step, backend=backend, fullgraph=True) if compiles else step
        for seed in range(2):
            loss, product = call(random_input((4, 8), seed))
            loss.backward()
        assert (loss.dtype, product.dtype) == (torch.float32, torch.float16)
        results.append(([loss.detach(), product.detach()], {n: p.grad for n, p in model.named_parameters()}))
    assert_close(*results, tolerance=0 if backend == "eager" else 2**-6)


def test_compile_before_apply_is_refused() -> None:
    def refused(model: nn.Module, message: str) -> None:
        with pytest.raises(ApplyError, match=message):
            autoprec.apply(model, MIXED)
        assert not any("forward" in module.__dict__ and "autoprec" in str(module.forward) for module in model.modules())

    whole = "apply: the model is compiled; apply the policy first, then call "
    refused(torch.compile(nn.Linear(4, 4), backend="eager"), whole + "torch.compile on the model")  # type: ignore[arg-type]
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    refused(model, whole + r"compile\(\) of the model")
    part = nn.Sequential(nn.Linear(4, 4))
    part[0].compile(backend="eager")
    refused(part, r'apply: module "0" is compiled; apply the policy first, then call compile\(\) of the module')
    wrapped = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"))  # type: ignore[arg-type]
    refused(wrapped, r'module "0" is compiled; apply the policy first, then call torch.compile on the module')


@pytest.mark.parametrize("in_place", [True, False])
def test_remove_after_compile_restores_what_the_compiled_model_computes(*, in_place: bool) -> None:
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    precision = autoprec.apply(model, MIXED)
    x = random_input((4, 8))
    if in_place:
        model.compile(backend="eager", fullgraph=True)
        compiled: Any = model
    else:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert not torch.equal(compiled(x), plain(x))
    precision.remove()
    assert torch.equal(compiled(x), plain(x)), "the graph is guarded by the forward it was traced from"
    assert torch.equal(model(x), plain(x))


def chain() -> nn.Module:
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(8, 8), nn.ReLU())))


def test_a_deep_copy_is_compiled_with_its_own_leaves() -> None:
    model, _ = pair(chain, MIXED)
    x = random_input((4, 8))
    first = torch.compile(model, backend="eager", fullgraph=True)(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.neg_()
    assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(x), other(x))
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), first)


def test_a_leaf_may_be_compiled_alone() -> None:
    model, twin = pair(chain, MIXED)
    x = random_input((4, 8))
    for number in (0, 2):
        counter = CompileCounterWithBackend("eager")
        assert torch.equal(torch.compile(model[number], backend=counter, fullgraph=True)(x), twin[number](x))
        assert counter.frame_count == 1


def test_leaves_between_graph_breaks_run_as_they_are() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    model, twin = pair(Broken, replace(MIXED, outputs="computed"))
    counter = CompileCounterWithBackend("eager")
    x = random_input((2, 4, 3))
    assert torch.equal(torch.compile(model, backend=counter)(x), twin(x))
    assert counter.frame_count == 0, "as without a policy: no graph for each leaf"


class CheckpointedCode(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class CheckpointedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return y


def keeps_matmuls(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveModule(CheckpointedModule):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, keeps_matmuls)
        y: torch.Tensor = self.head(checkpoint(self.body, x, use_reentrant=False, context_fn=contexts))
        return y


class ReentrantModule(CheckpointedModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)  # this kind gives its parameters gradients only where its input needs one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(checkpoint(self.body, self.stem(x), use_reentrant=True))
        return y


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
@pytest.mark.parametrize("build", [CheckpointedCode, CheckpointedModule, SelectiveModule, ReentrantModule])
def test_checkpointed_code_compiles_with_its_casts(build: Callable[[], nn.Module], backend: str) -> None:
    model, twin = pair(build, MIXED)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_close(steps(model, compiled, (4, 8)), steps(twin, twin, (4, 8)), 0 if backend == "eager" else 2**-6)


class Counting(nn.Module):
    """Multiplies before, in and after checkpointed code, which may count how often it ran."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.counts, self.runs = counts, [0]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.2
        if self.counts:
            self.runs.append(1)
        return y

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 1.1, checkpoint(self.product, x, use_reentrant=False), x * 1.3


def test_indices_go_on_through_checkpointed_code() -> None:
    model, twin = pair(Counting, BY_INDEX)
    x = random_input((3,))
    ours = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert [y.dtype for y in ours] == [torch.bfloat16, torch.float16, torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(ours, twin(x), strict=True))


def test_what_checkpointed_code_itself_changes_is_refused_as_without_a_policy() -> None:
    for applies in (False, True):
        torch._dynamo.reset()
        model = Counting(counts=True)
        if applies:
            autoprec.apply(model, BY_INDEX)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"HOP: .* side effect"):
            torch.compile(model, backend="eager", fullgraph=True)(random_input((3,)))
