"""The precision inside FP32 matmuls at single sites, as the kernels of forward and backward see it set.

This CPU may have no reduced precision, where the setting changes no number; so `supported` is told that there is one,
and a dispatch mode reads the setting when each aten op runs, on the way forward and on the way back.
"""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoprec.errors import DeviceError
from autoprec.policy import MatmulPrecision, Parameters, Policy, Rule
from autoprec.runtime import apply, inside_fp32, matmul_precision

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "convolution", "convolution_backward")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_of_other_tests() -> None:
    gc.collect()  # a policy that goes while a test runs gives back the precision that it found


@pytest.fixture(autouse=True)
def every_precision_is_supported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(matmul_precision, "_supported", lambda _: ("ieee", "tf32", "bf16"))
    before = _settings()
    yield
    assert _settings() == before
    assert inside_fp32._holds == []
    assert matmul_precision.TURN._depth == 0


def _settings() -> dict[str, str]:
    return {op: torch._C._get_fp32_precision_getter("mkldnn", op) for op in ("matmul", "conv", "rnn")}


class Seen(TorchDispatchMode):
    """Notes the precision that each product finds, and the dtype of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, str]] = []
        self.others: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            setting = "conv" if "conv" in name else "matmul"
            self.products.append((name, torch._C._get_fp32_precision_getter("mkldnn", setting)))
            self.dtypes |= {each.dtype for each in args if isinstance(each, Tensor)}
        elif name in ("gelu", "gelu_backward"):
            self.others.add(torch._C._get_fp32_precision_getter("mkldnn", "matmul"))
        return func(*args, **(kwargs or {}))

    @property
    def precisions(self) -> list[str]:
        return [precision for _, precision in self.products]


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    return Policy(name="p", rules=tuple(Rule(sites=sites, format=name) for sites, name in rules), **settings)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
FIRST = policy(("0:linear", "fp32_bf16"), ("*", "fp32"))


@pytest.mark.parametrize(("name", "precision"), [("tf32", "tf32"), ("fp32_bf16", "bf16"), ("fp32_ieee", "ieee")])
def test_forward_and_backward_of_the_site_alone_see_it(name: str, precision: MatmulPrecision) -> None:
    other = "ieee" if precision != "ieee" else "tf32"
    model = mlp()
    with apply(model, policy(("0:linear", name), ("*", "fp32"), float32_matmul=other)), Seen() as seen:
        model(X.clone().requires_grad_()).sum().backward()
    # Forward 0, forward 2; backward of 2: two products, backward of 0: two products.
    assert seen.precisions == [precision, other, other, other, precision, precision]
    assert seen.others == {other}


def test_results_are_those_of_fp32_where_the_setting_changes_nothing() -> None:
    expected, model = mlp(), mlp()
    with apply(model, FIRST):
        assert torch.equal(model(X), expected(X))


def test_the_site_computes_on_fp32_tensors_whatever_it_is_given() -> None:
    model = mlp()
    rules = policy(("0:linear", "tf32"), ("*", "bf16"), parameters=Parameters(storage="bf16"))
    with apply(model, rules), Seen() as seen:
        model[0](X.bfloat16())
    assert seen.dtypes == {torch.float32}


def test_ops_that_multiply_nothing_are_plain_fp32_sites() -> None:
    model = mlp()
    with apply(model, policy(("*", "fp32_bf16"))), Seen() as seen:
        model(X.bfloat16()).sum().backward()
    assert set(seen.precisions) == {"bf16"}
    assert len(seen.others) == 1
    assert seen.others != {"bf16"}


@pytest.mark.parametrize(
    ("module", "x", "setting"),
    [
        (nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5), "conv"),
        (nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8), "matmul"),
    ],
)
def test_convolution_and_attention(module: nn.Module, x: Tensor, setting: str) -> None:
    def result() -> Tensor:
        found: Any = module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
        assert isinstance(found, Tensor)
        return found

    with apply(module, policy(("*", "tf32"))), Seen() as seen:
        result().sum().backward()
    assert set(seen.precisions) == {"tf32"}
    assert len(seen.precisions) >= 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnns_are_set_with_their_matmuls(kind: type[nn.RNNBase]) -> None:
    module = kind(4, 4)
    with apply(module, policy(("*", "tf32"))), Seen() as seen:
        module(torch.randn(3, 2, 4))[0].sum().backward()
    assert set(seen.precisions) <= {"tf32"}


def test_the_gradient_of_the_gradient_sees_it_too() -> None:
    model = mlp()
    x = X.clone().requires_grad_()
    with apply(model, FIRST), Seen() as seen:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first = list(seen.products)
        grad.square().sum().backward()
    assert seen.precisions.count("bf16") >= 3
    second = [precision for _, precision in seen.products[len(first) :]]
    assert "bf16" in second
    assert set(second) == {"bf16", "ieee"}
    # Every product with the 4 inputs of layer 0 among its sizes: 2 * d(grad)/d(...) of layer 0 alone.
    assert second.count("bf16") == _products_of_the_first_layer()


def _products_of_the_first_layer() -> int:
    """Return how many products a double backward makes in layer 0: in all, less those of a model of layer 2 alone."""

    def count(model: nn.Module, width: int) -> int:
        x = torch.randn(3, width, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with Seen() as seen:
            grad.square().sum().backward()
        return len(seen.products)

    whole = count(mlp(), 4)
    layer = count(mlp()[1:], 8)
    return whole - layer


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_run_each_site_as_it_ran_first(reentrant: bool) -> None:
    model = mlp()
    x = X.clone().requires_grad_()
    rules = policy(("0:linear", "tf32"), ("2:linear", "fp32_bf16"), ("*", "fp32"))
    with apply(model, rules), Seen() as seen:
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
        forward = seen.precisions.copy()
        loss.backward()
    assert forward == ["tf32", "bf16"]
    again = seen.precisions[2:]
    assert again == (["tf32", "bf16", "bf16", "bf16", "tf32", "tf32"] if reentrant else again)
    assert again.count("tf32") == 3
    assert seen.others == {"ieee"}


def test_checkpointed_sites_without_a_rule_do_not_see_what_the_backward_of_a_site_set() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    rules = policy(("2:linear", "fp32_bf16"), ("*", "fp32"))
    with apply(model, rules), Seen() as seen:
        loss = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum()
        del seen.products[:]
        loss.backward()
    # Run again inside the backward of 2: 0, 1 and, unless it stops before, 2.
    assert seen.precisions[:2] == ["ieee", "ieee"]
    assert seen.precisions.count("bf16") >= 2


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("in the backward")


def test_a_forward_that_fails_leaves_nothing_set() -> None:
    model = mlp()
    with apply(model, FIRST), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(3, 5))


def test_a_backward_that_fails_elsewhere_leaves_nothing_set() -> None:
    model = mlp()
    with apply(model, FIRST), pytest.raises(RuntimeError, match="in the backward"):
        model(Failing.apply(X.clone().requires_grad_())).sum().backward()


def test_a_backward_that_fails_inside_the_node_leaves_nothing_set() -> None:
    model = mlp()

    def unpack(_: Tensor) -> Tensor:
        raise RuntimeError("cannot unpack")

    with apply(model, policy(("*", "fp32_bf16"))):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            loss = model[2](X.new_ones(3, 8).requires_grad_()).sum()
        applied = _settings()
        for run in (loss.backward, lambda: torch.autograd.grad(loss, model[2].weight)):
            with pytest.raises(RuntimeError, match="cannot unpack"):
                run()
            assert inside_fp32._holds == []
            assert _settings() == applied


def test_two_models_with_two_policies_in_one_backward() -> None:
    one, two = mlp(), mlp()
    with apply(one, policy(("*", "tf32"))), apply(two, policy(("*", "fp32_bf16"))), Seen() as seen:
        two(one(X)).sum().backward()
    assert seen.precisions == ["tf32"] * 2 + ["bf16"] * 2 + ["bf16"] * 4 + ["tf32"] * 3


def test_nodes_that_another_thread_made_before_the_site_are_not_followed() -> None:
    """Numbers of nodes count by thread: those of the input may be larger than that of the site."""
    model = mlp()
    h = F.gelu(model[0](X.clone().requires_grad_()))
    results: list[Tensor] = []
    with apply(model, policy(("2:linear", "fp32_bf16"), ("*", "fp32"))), Seen() as seen:
        thread = threading.Thread(target=lambda: results.append(model[2](h)))
        thread.start()
        thread.join()
        assert results[0].grad_fn is not None
        assert h.grad_fn is not None
        assert results[0].grad_fn._sequence_nr() < h.grad_fn._sequence_nr()
        results[0].sum().backward()
    assert seen.others == {"ieee"}
    assert seen.precisions == ["bf16", "bf16", "ieee", "ieee"]


def test_one_backward_twice() -> None:
    model = mlp()
    with apply(model, FIRST), Seen() as seen:
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        once = seen.precisions[2:]
        loss.backward()
    assert seen.precisions[2:] == once * 2
    assert "bf16" in once


def test_threads_take_turns() -> None:
    """Two threads train two models with two precisions; each product of each must find its own."""
    wrong: list[str] = []
    barrier = threading.Barrier(2)

    def train(name: str, precision: str) -> None:
        model = mlp()
        with apply(model, policy(("*", name))):
            barrier.wait()
            for _ in range(40):
                with Seen() as seen:
                    model(X).sum().backward()
                wrong.extend(each for each in seen.precisions if each != precision)
            barrier.wait()

    threads = [threading.Thread(target=train, args=each) for each in (("tf32", "tf32"), ("fp32_bf16", "bf16"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_applying_a_policy_waits_for_a_call_of_another_thread() -> None:
    """What is found, to be put back by `remove()`, must not be what is set for one call."""
    inside, applied = threading.Event(), threading.Event()
    found: list[Any] = []

    def claim() -> None:
        inside.wait()
        found.append(matmul_precision.claim_float32_matmul("cpu", "tf32"))
        applied.set()

    thread = threading.Thread(target=claim)
    thread.start()

    class Waiting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "addmm" and not inside.is_set():
                inside.set()
                assert not applied.wait(0.2)
            return func(*args, **(kwargs or {}))

    before = _settings()
    model = mlp()
    with apply(model, FIRST), Waiting():
        model(X)
        thread.join()
        matmul_precision.release(found[0])
    assert _settings() == before


def test_double_and_given_results_are_left_as_they_are() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            double = x.double() @ x.double().t()
            out = torch.zeros(3, 3)
            torch.mm(x, x.t(), out=out)
            return out.addmm_(x, x.t()) + double

    model = Model()
    expected = model(X.detach())
    with apply(model, policy(("*", "fp32_bf16"))), Seen() as seen:
        assert torch.equal(model(X.detach()), expected)
    assert seen.precisions == ["ieee", "bf16", "bf16"]


def test_a_precision_that_changes_nothing_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_precision, "_supported", lambda _: ("ieee",))
    message = (
        'policy "p" has a rule with format tf32, and "tf32" inside FP32 matmuls changes nothing on this cpu device; '
        "formats with an effect there: fp32, fp32_ieee"
    )
    model = mlp()
    with pytest.raises(DeviceError, match=message):
        apply(model, policy(("*", "tf32")))
    assert "forward" not in model.__dict__
    with apply(model, policy(("*", "fp32_ieee"))):
        model(X)


@pytest.mark.slow
def test_compiled_the_site_runs_between_graphs_and_fullgraph_says_why() -> None:
    model = mlp()
    with apply(model, FIRST):
        expected = model(X)
        with Seen() as seen:
            result = torch.compile(model, backend="aot_eager")(X)
            result.sum().backward()
        assert torch.equal(result, expected)
        assert seen.precisions == ["bf16", "ieee", "ieee", "ieee", "bf16"]
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot trace a precision inside FP32 matmuls"):
            torch.compile(model, backend="aot_eager", fullgraph=True)(X)


def test_the_engine_is_wrapped_once() -> None:
    for _ in range(2):
        inside_fp32.put_back_after_failures()
    run: Any = getattr(torch.autograd, inside_fp32._ENGINE)
    assert not hasattr(run.autoprec_original, "autoprec_original")
