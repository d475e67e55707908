"""What training loops do around a model: checkpoint activations, accumulate, clip, capture graphs, load data."""

import copy
import functools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import autoprec
from autoprec.errors import ApplyError
from autoprec.policy import Policy, Rule, preset, preset_names
from tests.tiny_models import MODELS

MIXED = Policy(
    name="mixed",
    rules=(
        Rule(sites="*:softmax", format="fp32"),
        Rule(sites="*:gelu#1", format="fp32"),
        Rule(sites="*:gelu", format="fp16"),
        Rule(sites="*", format="bf16"),
    ),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(F.gelu(F.gelu(self.rise(self.norm(x)))).softmax(-1) @ self.fall.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class CheckpointedBody(Block):
    """Checkpoints functional code with `checkpointed`, whatever kind that is."""

    def __init__(self, checkpointed: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.checkpointed(self.body, x)


def keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non_reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, keep_matmuls),
    ),
}


def gradients(model: nn.Module, rules: Policy | str, num_micro_batches: int = 2) -> list[torch.Tensor]:
    precision = autoprec.apply(model, rules)
    for seed in range(num_micro_batches):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with precision.loss():
            loss = model(x).square().mean()
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("rules", [MIXED, "autocast-bf16", "autocast-fp16"], ids=["mixed", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_code_has_the_gradients_of_plain_code(kind: str, rules: Policy | str) -> None:
    checkpointed = seeded(lambda: nn.Sequential(*(CheckpointedBody(KINDS[kind]) for _ in range(2))))
    plain = seeded(lambda: nn.Sequential(Block(), Block()))
    assert_equal(gradients(checkpointed, rules), gradients(plain, rules))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_sequential_has_the_gradients_of_plain_code(*, reentrant: bool) -> None:
    class Segments(nn.Module):
        def __init__(self, *, checkpointed: bool) -> None:
            super().__init__()
            self.blocks, self.checkpointed = nn.Sequential(*(Block() for _ in range(4))), checkpointed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.checkpointed:
                y: torch.Tensor = self.blocks(x)
                return y
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=reentrant)

    assert_equal(
        gradients(seeded(lambda: Segments(checkpointed=True)), MIXED),
        gradients(seeded(lambda: Segments(checkpointed=False)), MIXED),
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT"])
def test_gradient_checkpointing_of_transformers_changes_no_gradient(name: str, *, reentrant: bool) -> None:
    found = []
    for checkpoints in (True, False):
        build, batch = MODELS[name]()
        model: Any = seeded(build)
        if checkpoints:
            newer = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5 on
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        model.train()
        # A tied weight is cast once or once a use, and its gradients are added in bf16 or in FP32 accordingly.
        rules = (Rule(sites="*:embedding", format="as_given"), *MIXED.rules)
        autoprec.apply(model, Policy(name="untied", rules=rules))
        torch.manual_seed(1)  # dropout
        model(**batch).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(*found)


def test_accumulated_gradients_are_the_sum_over_the_batch_where_sums_are_exact() -> None:
    """Small integers: every product and sum fits bf16's 8 bits, so splitting the batch changes nothing."""
    found = []
    for num_micro_batches in (1, 4):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 3 - 1)
        precision = autoprec.apply(model, Policy(name="low", rules=(Rule(sites="*", format="bf16"),)))
        x = (torch.arange(32).reshape(8, 4) % 3 - 1).float()
        for part in x.chunk(num_micro_batches):
            with precision.loss():
                loss = model(part).sum()
            loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(*found)


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_sees_fp32_gradients(clip: str) -> None:
    """By hand: the gradients of an explicit-cast model, clipped by the same function."""
    model = seeded(lambda: nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    autoprec.apply(model, Policy(name="low", rules=(Rule(sites="*", format="bf16"),)))
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    F.linear(x.bfloat16(), twin.weight.bfloat16(), twin.bias.bfloat16()).float().square().sum().backward()  # type: ignore[operator, union-attr]
    for each in (model, twin):
        if clip == "norm":
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        else:
            nn.utils.clip_grad_value_(each.parameters(), 0.5)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])  # type: ignore[misc]


# Host synchronization


class NoSync(TorchDispatchMode):
    """Raises on what makes the host wait for the device, and would break a CUDA graph capture."""

    SYNCING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_cpu", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.SYNCING:
            raise AssertionError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


def policies() -> Iterator[Policy]:
    yield MIXED
    for name in preset_names("cpu"):
        rules = preset(name, "cpu")
        if rules.compile != "as_given":
            continue  # compiled code waits where inductor's does
        if rules.float32_matmul == "ieee":  # else a matter of the device's: some CPUs have no such matmul
            yield rules


@pytest.mark.parametrize("rules", list(policies()), ids=lambda rules: rules.name)
@pytest.mark.parametrize("name", ["GPT-2", "CNN", "encoder", "multiples of 16"])
def test_the_applied_path_never_waits_for_the_device(name: str, rules: Policy) -> None:
    if "fp8" in rules.name and name != "multiples of 16":
        pytest.skip("FP8 kernels take multiples of 16")
    if name == "multiples of 16":
        model: nn.Module = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 16))
        batch: dict[str, Any] = {"input": torch.randn(16, 32)}
    elif name == "encoder":
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        batch = {"src": torch.randn(2, 4, 8)}
    else:
        build, batch = MODELS[name]()
        model = build()
    precision = autoprec.apply(model, rules)
    for _ in range(2):
        with NoSync():
            with precision.loss():
                output = model(**batch)
                loss = output.sum() if isinstance(output, torch.Tensor) else output.loss
            loss.backward()


def test_the_watch_for_waiting_sees_it() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, args, output: output * output.sum().item())
    autoprec.apply(model, MIXED)
    with NoSync(), pytest.raises(AssertionError, match="makes the host wait"):
        model(torch.ones(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [MIXED, "autocast-bf16"], ids=["mixed", "bf16"])
def test_a_step_is_captured_in_a_cuda_graph_and_replayed(rules: Policy | str) -> None:
    model = seeded(lambda: nn.Sequential(Block(), Block())).cuda()
    twin = copy.deepcopy(model)
    precision, other = autoprec.apply(model, rules), autoprec.apply(twin, rules)
    x = torch.zeros(4, 8, device="cuda")

    def step(which: nn.Module, handle: autoprec.Precision) -> torch.Tensor:
        which.zero_grad(set_to_none=False)
        with handle.loss():
            loss = which(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in which.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, precision)
            step(twin, other)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, precision)
    for seed in range(3):
        x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        step(twin, other)
        assert_equal(list(model.parameters()), list(twin.parameters()))


# Data loading


class Features(torch.utils.data.Dataset[torch.Tensor]):
    """Computes with torch ops, and tells the dtype it computed in; holds a model if it is given one."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((2, 2), 1.001) * (index + 1)
        y = F.linear(x, torch.full((2, 2), 1.001)).softmax(-1) + x
        assert y.dtype == torch.float32
        return y


def start_methods() -> list[str]:
    return [name for name in ("fork", "spawn") if name in multiprocessing.get_all_start_methods()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("start", start_methods())
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.long)])
def test_workers_of_a_data_loader_cast_nothing(start: str, *, inside: bool) -> None:
    model = nn.Linear(2, 2)
    precision = autoprec.apply(model, MIXED)
    wanted = [Features()[index] for index in range(4)]
    loader = torch.utils.data.DataLoader(Features(), batch_size=None, num_workers=1, multiprocessing_context=start)
    if inside:  # workers start while loss code runs
        with precision.loss():
            found = [each.clone() for each in loader]
    else:
        found = []
        for each in loader:
            model(each)
            found.append(each)
    assert_equal(found, wanted)


def test_a_dataset_that_holds_an_applied_model_is_not_sent_to_a_spawned_worker() -> None:
    model = nn.Linear(2, 2)
    autoprec.apply(model, MIXED)
    loader = torch.utils.data.DataLoader(Features(model), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(
        ApplyError, match=r"a policy is installed, not saved; save model.state_dict\(\), or call remove"
    ):
        next(iter(loader))
