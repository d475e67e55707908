"""`trace`: what ran is found out from below, holds the policy to its word, and leaves the run as it was."""

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from autoprec.errors import TraceError
from autoprec.graph.site import Site
from autoprec.policy import Parameters, Policy, Rule
from autoprec.runtime import apply, cast_mode, matmul_precision
from autoprec.runtime.float8 import Float8Matmul
from autoprec.runtime.trace import SiteTrace, Trace


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules), **settings)


LOW = policy(("*", "bf16"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(F.softmax(self.norm(self.one(x)), dim=-1)) + x


class Sites(nn.Module):
    """Runs one function on its input; a parameter makes the loss require grad."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def traced(model: nn.Module, rules: Policy = LOW, batch: Any = X, **arguments: Any) -> Trace:
    with apply(model, rules) as precision:
        return precision.trace(batch, **arguments)


def row(found: Trace, site: str) -> SiteTrace:
    return next(each for each in found.rows if each.site == Site.parse(site))


def one(function: Callable[..., Any], site: str, rules: Policy = LOW, batch: Any = X) -> SiteTrace:
    return row(traced(Sites(function), rules, batch), site)


def test_every_site_in_order_with_its_formats_and_rule() -> None:
    rules = policy(("one:*", "bf16"), ("*:softmax", "fp16"), (":add", "as_given"), ("*", "fp32"))
    found = traced(Net(), rules)
    assert [(str(r.site), r.asked, r.rule, r.ran, r.ran_backward, r.verdict) for r in found.rows] == [
        ("one:linear#0", "bf16", 0, ("bf16",), ("bf16",), "honored"),
        ("norm:layer_norm#0", "fp32", 3, ("fp32",), ("fp32",), "honored"),
        (":softmax#0", "fp16", 1, ("fp16",), ("fp16",), "honored"),
        ("two:linear#0", "fp32", 3, ("fp32",), ("fp32",), "honored"),
        (":add#0", "as_given", 2, ("fp32",), (), "honored"),
    ]
    found.check()
    matmuls = [kernel for kernel in row(found, "two:linear#0").backward_kernels if kernel.is_matmul]
    assert [str(kernel) for kernel in matmuls] == ["mm(fp32, fp32) -> fp32"]
    assert row(found, "one:linear#0").honored


def test_of_a_norm_the_activation_counts() -> None:
    found = traced(Net())
    assert row(found, "norm:layer_norm#0").kernels[0].takes == ("bf16", "fp32", "fp32")
    assert not found.dishonored
    stored = traced(Net(), policy(("*:layer_norm", "fp32"), ("*", "bf16"), parameters=Parameters(storage="bf16")))
    assert row(stored, "norm:layer_norm#0").verdict == "honored"
    batch_norm = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))
    assert not traced(batch_norm, batch=torch.rand(2, 4, 3)).dishonored


def test_the_table_is_plain_text() -> None:
    text = str(traced(Sites(lambda m, x: (x.double() @ m.weight.double()).float())))
    assert 'under policy "test": 1 sites, 1 exempt, 0 dishonored' in text
    assert ":matmul#0" in text
    assert "exempt: left alone: an argument is float64" in text
    plain = traced(Net()).to_plain()
    assert (plain["schema_version"], plain["num_sites"], plain["num_dishonored"]) == (1, 5, 0)
    assert plain["sites"][0]["backward_kernels"][0] == "mm(bf16, bf16) -> bf16"


# A cast that is broken must be seen, wherever.


def not_cast(mode: Any, value: Any, dtype: torch.dtype) -> Any:
    return value


def test_a_cast_that_does_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_mode.CastMode, "cast", not_cast)
    found = traced(Net())
    assert {str(r.site) for r in found.dishonored} == {str(r.site) for r in found.rows}
    assert row(found, "one:linear#0").reason == "its arguments were not cast: they came in as fp32"
    with pytest.raises(
        TraceError, match=r"one:linear#0: rule 1 \"\*\" asked bf16; ran fp32 forward, fp32 backward"
    ) as e:
        found.check()
    assert "give the site a rule of its own" in str(e.value)
    assert "5 sites were not honored" in str(e.value)


def test_a_long_list_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_mode.CastMode, "cast", not_cast)
    with pytest.raises(TraceError, match=r"12 sites were .*(?s:.*)and 2 more; print\(trace\)"):
        traced(nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])).check()


def test_a_cast_of_only_some_arguments_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cast_mode.CastMode.cast

    def not_the_first(mode: Any, value: Any, dtype: torch.dtype) -> Any:
        return value if value is X else original(mode, value, dtype)

    monkeypatch.setattr(cast_mode.CastMode, "cast", not_the_first)
    assert one(lambda m, x: (x[:1] + x) @ m.weight, ":add#0").verdict == "dishonored"


class WideBackward(torch.autograd.Function):
    """Runs a matmul in bf16, and its backward in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.bfloat16() @ weight.bfloat16()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0].float() @ weight.float().t(), x.float().t() @ grads[0].float()


def test_a_backward_in_another_format_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cast_mode.CastMode.on_site

    def on_site(mode: Any, func: Any, call: Any, frame: Any, index: int, args: Any, kwargs: Any) -> Any:
        if call.op.name == "matmul":
            return WideBackward.apply(*args)
        return original(mode, func, call, frame, index, args, kwargs)

    monkeypatch.setattr(cast_mode.CastMode, "on_site", on_site)
    found = one(lambda m, x: x @ m.weight, ":matmul#0")
    assert (found.ran, found.ran_backward, found.verdict) == (("bf16",), ("fp32",), "dishonored")


def test_what_must_be_left_alone_may_not_be_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    def quiet(m: Sites, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return y.float() @ m.weight

    assert one(quiet, ":mul#0").verdict == "exempt"
    monkeypatch.setattr("autoprec.runtime.site_mode.Frame.leaves_alone", lambda frame: False)
    watched = one(quiet, ":mul#0")
    assert watched.verdict == "honored"  # the rule holds and so does the oracle, which asks the same frame
    monkeypatch.undo()
    original = cast_mode.CastMode.on_site

    def eager(mode: Any, func: Any, call: Any, frame: Any, index: int, args: Any, kwargs: Any) -> Any:
        args = tuple(a.bfloat16() if isinstance(a, torch.Tensor) else a for a in args)
        return original(mode, func, call, frame, index, args, kwargs)

    monkeypatch.setattr(cast_mode.CastMode, "on_site", eager)
    found = one(quiet, ":mul#0")
    assert found.verdict == "dishonored"
    assert found.reason == "was to be left alone: no_grad code in a module that trains, but was cast to bf16"


def test_autocast_around_the_model_is_seen() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = traced(Net(), policy(("one:*", "fp16"), ("*", "fp32")))
    assert row(found, "two:linear#0").verdict == "dishonored"
    assert "torch.autocast is on around it" in row(found, "two:linear#0").reason


def test_the_models_own_cast_under_a_policy_that_installs_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    model.forward = lambda x: model[1](model[0](x).bfloat16())  # type: ignore[method-assign]
    found = traced(model, policy(("*", "fp32"), outputs="computed"))
    assert row(found, "0:linear#0").verdict == "honored"
    assert row(found, "1:linear#0").verdict == "dishonored"
    assert "forward" not in model[0].__dict__


# Exemptions that the semantics of policies state.


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def quiet(m: Sites, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return y @ m.weight


def accumulated(m: Sites, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3, 4)
    total += x @ m.weight
    return total


def into_out(m: Sites, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        total = torch.zeros(3, 4)
    with torch.enable_grad():
        torch.mul(x, x, out=total)
    return total @ m.weight


def in_place_relu(m: Sites, x: torch.Tensor) -> torch.Tensor:
    return F.relu((x @ m.weight).float(), inplace=True)


def renormalized(m: Sites, x: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.tensor([0, 1]), m.weight, max_norm=1.0)


def sparse(m: Sites, x: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.tensor([0, 1]), m.weight, sparse=True)


def named_dtype(m: Sites, x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x @ m.weight, dim=-1, dtype=torch.float32)


def math_attention(m: Sites, x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        q = (x @ m.weight)[None, None]
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(
    ("function", "site", "reason"),
    [
        (lambda m, x: Doubled.apply(x @ m.weight), ":mul#0", ""),
        (lambda m, x: Doubled.apply((x @ m.weight).float()), ":mul#0", "left alone: inside a custom autograd Function"),
        (quiet, ":mul#0", "left alone: no_grad code in a module that trains"),
        (lambda m, x: (x.double() * 2).float() @ m.weight, ":mul#0", "left alone: an argument is float64"),
        (accumulated, ":add#0", "writes to its first argument, and computes in the dtype of that"),
        (into_out, ":mul#0", "writes to out=, and computes in the dtype of that"),
        (in_place_relu, ":relu#0", "writes to its first argument, and computes in the dtype of that"),
        (renormalized, ":embedding#0", "left alone: the embedding renormalizes its weight in place"),
        (sparse, ":embedding#0", "left alone: no cast passes on the sparse gradient of this embedding"),
        (named_dtype, ":softmax#0", "the call names its own dtype and ran in fp32"),
        (math_attention, ":scaled_dot_product_attention#0", "torch's own kernel casts to fp32 inside the call"),
        (lambda m, x: F.dropout(x @ m.weight, 0.5, False), ":dropout#0", "no kernel computed"),
    ],
)
def test_exemptions(function: Callable[..., Any], site: str, reason: str) -> None:
    found = one(function, site)
    assert found.verdict == ("exempt" if reason else "honored")
    assert found.reason.startswith(reason)


def test_an_op_that_writes_and_needs_one_dtype_computes_in_that() -> None:
    found = one(lambda m, x: torch.zeros(3, 4).addmm_(x, m.weight), ":addmm#0")
    assert (found.ran, found.verdict) == (("fp32",), "exempt")


def test_promote_wants_the_widest_dtype_given(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = policy((":cat", "promote"), (":mul", "bf16"), ("*", "as_given"))

    def mixed(m: Sites, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * m.weight[0], x])

    found = one(mixed, ":cat#0", rules)
    assert (found.ran, found.verdict) == (("fp32",), "honored")
    monkeypatch.setattr(cast_mode, "widest", lambda dtypes: torch.bfloat16)
    assert one(mixed, ":cat#0", rules).verdict == "dishonored"


# Where people train.


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpointed_code_is_traced_in_both_directions(*, reentrant: bool, whole: bool, casts: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.one if whole else lambda y: F.linear(y, self.one.weight)
            h: torch.Tensor = checkpoint(inner, self.two(x), use_reentrant=reentrant)
            return h * 2

    found = traced(Checkpointed(), LOW if casts else policy(("*", "fp32")))
    assert not found.dishonored
    site = row(found, "one:linear#0" if whole else ":linear#0")
    ran = ("bf16",) if casts else ("fp32",)
    assert (site.num_calls, site.ran, site.ran_backward) == (2, ran, ran)
    assert [str(r.site) for r in found.rows] == ["two:linear#0", str(site.site), ":mul#0"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_runs_between_sites_in_a_recomputed_forward_belongs_to_no_backward(*, reentrant: bool) -> None:
    def inner(m: Sites, x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ m.weight.bfloat16()).sigmoid() * x.roll(1).bfloat16()  # a roll in fp32 has no site

    found = traced(Sites(lambda m, x: checkpoint(inner, m, x * m.weight[:3], use_reentrant=reentrant)))
    assert not found.dishonored
    assert all("roll" not in kernel.name for each in found.rows for kernel in each.backward_kernels)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_torch_casts_inside_a_recomputed_call_is_exempt_too(*, reentrant: bool) -> None:
    def attend(m: Sites, x: torch.Tensor) -> torch.Tensor:
        x = (x @ m.weight)[None]
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)  # no fused kernel: torch computes in fp32

    found = traced(Sites(lambda m, x: checkpoint(attend, m, x * m.weight[:3], use_reentrant=reentrant)))
    assert not found.dishonored
    assert [r.num_calls for r in found.exempt] == [2]


def test_checkpointed_functions_keep_their_frames_in_a_process_that_never_cast() -> None:
    code = """if True:
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.checkpoint import checkpoint
        from autoprec.runtime import apply

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4, 4))

            def forward(self, x):
                return checkpoint(lambda y: F.linear(y, self.weight), x, use_reentrant=False)

        (row,) = apply(Net(), "fp32").trace(torch.ones(2, 4)).rows
        assert (row.num_calls, row.ran_backward) == (2, ("fp32",)), row
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_shared_module_has_the_worst_of_its_verdicts() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            with torch.no_grad():
                self.norm(x.double())
            return self.norm(y)

    model = Twice()
    model.norm = nn.LayerNorm(4, elementwise_affine=False)
    found = row(traced(model), "norm:layer_norm#0")
    assert (found.num_calls, found.verdict, found.ran) == (2, "exempt", ("float64", "bf16"))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("rules", [LOW, policy(("*", "fp32")), policy(("*", "fp16"))])
def test_recurrent(kind: Any, rules: Policy) -> None:
    found = traced(kind(4, 4), rules, loss=lambda model, batch: model(batch)[0].sum())
    assert not found.dishonored
    (recurrent,) = (r for r in found.rows if r.site.op != "sum")
    assert recurrent.ran == recurrent.ran_backward == (rules.rules[0].format,)


@pytest.mark.parametrize("rules", [LOW, policy(("*", "fp32"))])
def test_attention_modules(rules: Policy) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    found = traced(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), rules, torch.rand(2, 3, 8))
    assert not found.dishonored
    assert any(".self_attn:" in str(r.site) for r in found.rows)
    flash = [k for r in found.rows for k in r.kernels if k.name == "_scaled_dot_product_flash_attention_for_cpu"]
    assert {k.takes for k in flash} == {(rules.rules[0].format,) * 3}
    back = [k for r in found.rows for k in r.backward_kernels if k.name.startswith("_scaled_dot_product")]
    assert {set(k.takes) == {rules.rules[0].format} for k in back} == {True}


def test_in_place_ops_and_their_backward() -> None:
    def in_place(m: Sites, x: torch.Tensor) -> torch.Tensor:
        y = x @ m.weight
        y[0].mul_(x[1])
        y.relu_()
        return y * m.weight[:3]

    found = traced(Sites(in_place))
    assert not found.dishonored
    assert row(found, ":mul#1").ran_backward == ("bf16",)


def test_loss_code_is_traced_where_it_is_given() -> None:
    found = traced(Net(), loss=lambda model, batch: F.mse_loss(model(batch), batch))
    assert row(found, "@loss:mse_loss#0").ran == ("bf16",)
    assert not any(r.site.module == "@loss" for r in traced(Net()).rows)


def test_a_gradient_penalty() -> None:
    def penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return gradient.square().sum()

    found = traced(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), loss=penalty)
    assert not found.dishonored
    assert row(found, "0:linear#0").ran_backward == ("bf16",)


@pytest.mark.parametrize("batch", [{"x": X}, (X,), [X], X])
def test_batches_as_they_are_usually_given(batch: Any) -> None:
    assert len(traced(Net(), batch=batch).rows) == 5


@pytest.mark.parametrize("wrap", [lambda y: {"loss": y.sum(), "logits": y}, lambda y: (y, {"more": y}), lambda y: [y]])
def test_outputs_as_they_are_usually_returned(wrap: Callable[[torch.Tensor], Any]) -> None:
    found = traced(Sites(lambda m, x: wrap(x @ m.weight)))
    assert row(found, ":matmul#0").ran_backward == ("bf16",)


def test_the_precision_inside_fp32_matmuls() -> None:
    with apply(Net(), policy(("*", "fp32"))) as precision:
        precision.trace(X).check()
        found = matmul_precision._write("cpu", "bf16")
        try:
            trace = precision.trace(X)
        finally:
            matmul_precision.restore(found)
    broken = row(trace, "one:linear#0")
    assert broken.ran == ("fp32 (bf16 inside)",)
    assert broken.reason.startswith("addmm ran with bf16 inside FP32, and the policy says ieee; something set")
    assert {str(r.site) for r in trace.dishonored} == {"one:linear#0", "two:linear#0"}


@pytest.mark.parametrize(("emulates", "verdict"), [(True, "honored"), (False, "dishonored")])
def test_an_emulated_site_says_so(monkeypatch: pytest.MonkeyPatch, *, emulates: bool, verdict: str) -> None:
    pytest.importorskip("torchao")
    if not emulates:  # then FP32 products in its place are a broken promise
        monkeypatch.setattr(Float8Matmul, "is_emulated", False)
    with apply(nn.Linear(16, 16), policy(("*:linear", "fp8_e4m3"), ("*", "fp32"))) as precision:
        found = precision.trace(torch.ones(16, 16))
    assert (found.rows[0].emulated, found.rows[0].verdict) == (emulates, verdict)
    assert ("emulated" in str(found)) == emulates


# The run goes on as if nothing had been.


class Stateful(nn.Module):
    """Draws, keeps statistics, writes to a parameter, an input and its flags."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.table = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(4, 4, max_norm=0.1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        x.mul_(2)
        self.eval()
        self.train()
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return F.dropout(self.norm(self.one(x)), 0.5) + noise + self.table(ids)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("rules", [LOW, policy(("*", "fp32"))])
def test_nothing_is_changed(rules: Policy, *, breaks: bool) -> None:
    model = Stateful()
    precision = apply(model, rules)
    model.norm.eval()
    batch = (X.clone(), torch.tensor([0, 1, 2]))
    kept = torch.full((4, 4), 7.0)
    model.one.weight.grad = kept
    hooked: list[torch.Tensor] = []
    handle = model.one.weight.register_post_accumulate_grad_hook(hooked.append)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    flags = [module.training for module in model.modules()]
    states = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(*batch).sum()
        if breaks:
            raise ValueError("in the middle")
        return out

    if breaks:
        with pytest.raises(ValueError, match="in the middle"):
            precision.trace(batch, loss)
    else:
        precision.trace(batch, loss)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {n: id(b) for n, b in buffers.items()}
    assert torch.equal(batch[0], X)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert model.one.weight.grad is kept
    assert torch.equal(kept, torch.full((4, 4), 7.0))
    assert [p.grad for name, p in model.named_parameters() if name != "one.weight"] == [None] * 4
    assert hooked == []
    assert precision.watched_mode is None
    assert ("forward" in model.one.__dict__) == precision.casts
    model.one(X).sum().backward()
    assert len(hooked) == 1
    handle.remove()


def test_gradients_of_leaves_outside_the_model_come_back() -> None:
    outside, given = torch.ones(4, requires_grad=True), X.clone().requires_grad_()
    traced(Net(), batch=given, loss=lambda model, batch: (model(batch) * outside).sum())
    assert outside.grad is None
    assert given.grad is None


@pytest.mark.parametrize("rules", [LOW, policy(("*", "fp32"))])
def test_training_goes_on_bit_for_bit(rules: Policy) -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        precision = apply(model, rules)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            if watched:
                precision.trace(X)
                precision.find_overflow(X)
            optimizer.zero_grad()
            precision.backward(model(X).square().mean())
            precision.step(optimizer)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_under_no_grad_and_inference_mode_too() -> None:
    with torch.no_grad():
        assert row(traced(Net()), "one:linear#0").ran_backward == ("bf16",)
    precision = apply(Net(), LOW)
    with torch.inference_mode():
        assert row(precision.trace(X), "one:linear#0").ran_backward == ("bf16",)


# What cannot be traced.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's, when it loads the compiler
def test_compiled_models_are_refused() -> None:
    model = Net()
    precision = apply(model, LOW)
    model.one.compile()
    with pytest.raises(TraceError, match=r"trace: module one is compiled.*without torch.compile"):
        precision.trace(X)
    model = Net()
    precision = apply(model, LOW)
    model.two = torch.compile(model.two)  # type: ignore[assignment]
    with pytest.raises(TraceError, match=r"find_overflow: module two is compiled"):
        precision.find_overflow(X)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: model(batch), r"the loss is shape \(3, 4\)"),
        (lambda model, batch: model(batch).sum().detach(), "does not require grad"),
        (lambda model, batch: 1.0, "the loss is a float"),
    ],
)
def test_a_loss_must_be_a_scalar_that_requires_grad(loss: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traced(Net(), loss=loss)


def test_nothing_to_go_backward_from() -> None:
    with pytest.raises(TraceError, match="returned nothing that a backward pass can start from"):
        traced(Sites(lambda m, x: x * 2))


def test_a_policy_that_was_removed() -> None:
    precision = apply(Net(), LOW)
    precision.remove()
    with pytest.raises(TraceError, match='policy "test" is not installed any more'):
        precision.trace(X)
