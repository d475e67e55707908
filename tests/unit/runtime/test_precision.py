"""`apply`: what it casts, what it leaves alone, and that it can be taken back."""

import collections
import copy
import dataclasses
import gc
import inspect
import os
import pickle
import threading
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoprec.errors import ApplyError, PolicyFileError
from autoprec.policy import LossScale, Parameters, Policy, Rule, save_policy
from autoprec.runtime import Precision, apply, matmul_precision


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules), **settings)


class Net(nn.Module):
    """Two linears, a norm, and functional code whose dtypes it notes down."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        self.dtypes["one"] = h.dtype
        h = self.norm(h)
        self.dtypes["norm"] = h.dtype
        h = F.softmax(h, dim=-1)
        self.dtypes["softmax"] = h.dtype
        h = self.two(h) + x
        self.dtypes["add"] = h.dtype
        return h


def run(model: nn.Module, width: int = 4) -> torch.Tensor:
    output: torch.Tensor = model(torch.linspace(-1, 1, 3 * width).reshape(3, width))
    return output


def seeded_net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_first_match_wins_site_by_site() -> None:
    model = Net()
    apply(model, policy(("one:*", "bf16"), ("*:softmax", "fp16"), ("*:add", "bf16"), ("*", "fp32")))
    run(model)
    assert model.dtypes == {
        "one": torch.bfloat16,
        "norm": torch.float32,
        "softmax": torch.float16,
        "add": torch.bfloat16,
    }


def test_only_the_activation_of_a_norm_is_cast() -> None:
    model = Net()
    apply(model, policy(("norm:layer_norm", "bf16"), ("*", "fp32")))
    run(model).sum().backward()
    assert model.dtypes["norm"] == torch.bfloat16
    assert model.norm.weight.dtype == torch.float32
    assert model.norm.weight.grad is not None
    assert model.norm.weight.grad.dtype == torch.float32


def test_the_cast_equals_casting_by_hand() -> None:
    model, reference = seeded_net(), seeded_net()
    apply(model, policy(("one", "bf16"), ("*", "fp32")))
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    by_hand = F.linear(x.bfloat16(), reference.one.weight.bfloat16(), reference.one.bias.bfloat16())
    by_hand = reference.two(F.softmax(reference.norm(by_hand.float()), dim=-1)) + x
    assert torch.equal(model(x), by_hand)
    model(x).square().sum().backward()
    by_hand.square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_outputs_return_in_fp32_unless_the_policy_says_otherwise() -> None:
    assert run(applied(Net(), policy(("*", "bf16")))).dtype == torch.float32
    assert run(applied(Net(), policy(("*", "bf16"), outputs="computed"))).dtype == torch.bfloat16


def applied(model: nn.Module, rules: Policy) -> nn.Module:
    apply(model, rules)
    return model


class Sites(nn.Module):
    """Runs one function; the module owns its sites."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def low(function: Any, *args: Any, rules: Policy | None = None) -> Any:
    return applied(Sites(function), rules or policy(("*", "bf16"), outputs="computed"))(*args)


def test_integers_complex_and_double_are_left_alone() -> None:
    assert low(torch.add, torch.ones(2, dtype=torch.int64), 1).dtype == torch.int64
    assert low(torch.mul, torch.ones(2, dtype=torch.complex64), 2).dtype == torch.complex64
    assert low(torch.mul, torch.ones(2, dtype=torch.float64), torch.ones(2)).dtype == torch.float64


def test_an_argument_that_is_written_to_is_never_cast() -> None:
    def accumulate(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4)
        total += x
        total.add_(x)
        torch.add(x, x, out=total)
        total.index_add_(0, torch.tensor([0]), x[:1].bfloat16())
        return F.relu(total, inplace=True)

    result = low(accumulate, torch.full((4,), 1.0))
    assert result.dtype == torch.float32
    assert result.tolist() == [3, 2, 2, 2]


def test_tuples_and_keywords_are_cast() -> None:
    assert low(lambda x: torch.cat([x, x]), torch.ones(2)).dtype == torch.bfloat16
    assert low(lambda x: F.linear(input=x, weight=torch.ones(2, 2)), torch.ones(2)).dtype == torch.bfloat16
    assert low(lambda x: F.layer_norm(input=x, normalized_shape=(2,)), torch.ones(2)).dtype == torch.bfloat16


def test_no_grad_code_inside_a_training_module_is_left_alone_but_counted() -> None:
    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            first = x * 2
        return first, x * 2

    first, second = low(mixed, torch.ones(2, requires_grad=True))
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    by_index = policy((":mul#1", "fp16"), ("*", "bf16"), outputs="computed")
    assert low(mixed, torch.ones(2, requires_grad=True), rules=by_index)[1].dtype == torch.float16


def test_inference_under_no_grad_is_cast() -> None:
    model = applied(Net(), policy(("*", "bf16")))
    with torch.no_grad():
        run(model)
    assert isinstance(model, Net)
    assert model.dtypes["add"] == torch.bfloat16


def test_unnamed_matmuls_agree_on_the_widest_dtype() -> None:
    as_given = policy(("*", "as_given"), outputs="computed")
    spread = policy((":mul", "bf16"), ("*", "as_given"), outputs="computed")

    def product(x: torch.Tensor) -> torch.Tensor:
        return (x * 1) @ torch.ones(2, 2)

    assert low(product, torch.ones(2, 2), rules=spread).dtype == torch.float32
    assert low(lambda x: x.bfloat16() * 1, torch.ones(2), rules=as_given).dtype == torch.bfloat16


def test_a_neighbour_of_an_lstm_may_be_lowered() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.recur = nn.Linear(4, 4), nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states: torch.Tensor = self.recur(self.enter(x))[0]
            return states

    for rules in (
        policy(("enter", "bf16"), ("*", "fp32")),
        policy(("*", "bf16")),
        policy(("*", "as_given"), ("*", "bf16")),
    ):
        assert run(applied(Recurrent(), rules)).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_equal_gradients(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.one, x, use_reentrant=reentrant)
            return self.two(F.gelu(y))

    class Plain(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(F.gelu(self.one(x)))

    gradients = []
    for kind in (Checkpointed, Plain):
        torch.manual_seed(0)
        model = kind()
        precision = apply(model, policy(("*", "bf16")))
        with precision.loss():
            loss = model(torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()).square().sum()
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_backward_inside_the_loss_block_recomputes_in_the_same_formats() -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.one, x, use_reentrant=False)
            return y

    model = Checkpointed()
    precision = apply(model, policy(("*", "bf16")))
    with precision.loss():
        model(torch.ones(3, 4)).sum().backward()
    assert model.one.weight.grad is not None


def test_loss_code_has_the_module_loss() -> None:
    model = Net()
    precision = apply(model, policy(("@loss:mse_loss", "fp32"), ("*", "bf16"), outputs="computed"))
    output = run(model)
    with precision.loss():
        assert F.mse_loss(output, output).dtype == torch.float32
        assert (output.float() * 2).dtype == torch.bfloat16
    assert (output.float() * 2).dtype == torch.float32


def test_a_weight_used_twice_is_cast_once_per_forward_and_never_stale() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(self.one(x))

    model = Shared()
    apply(model, policy(("*", "bf16")))
    before = run(model)
    with torch.no_grad():
        model.one.weight.mul_(2)
        model.one.bias.zero_()
    after = run(model)
    fresh = Shared()
    fresh.load_state_dict(model.state_dict())
    apply(fresh, policy(("*", "bf16")))
    assert torch.equal(after, run(fresh))
    assert not torch.equal(before, after)
    with torch.no_grad():
        run(model)
    run(model).sum().backward()
    assert model.one.weight.grad is not None, "a cast made under no_grad is not reused for training"


def test_remove_restores_the_model_exactly() -> None:
    model = seeded_net()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys, signature = list(model.state_dict()), inspect.signature(model.forward)
    precision = apply(model, policy(("*", "bf16")))
    assert inspect.signature(model.forward) == signature
    assert list(model.state_dict()) == keys
    assert type(model) is Net
    run(model)
    precision.remove()
    precision.remove()
    model.dtypes.clear()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert torch.equal(run(model), run(seeded_net()))


def test_a_forward_of_the_instances_own_is_restored() -> None:
    model = nn.Linear(4, 4)
    own = lambda x: x * 3  # noqa: E731
    model.forward = own  # type: ignore[method-assign]
    with apply(model, policy(("*", "bf16"), outputs="computed")):
        assert run(model).dtype == torch.bfloat16
        assert inspect.signature(model.forward) == inspect.signature(own)
    assert model.forward is own


def test_an_exception_in_forward_leaves_the_thread_clean() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken")

    model = applied(Broken(), policy(("*", "bf16")))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            run(model)
    assert (torch.ones(1) * 2).dtype == torch.float32


def test_two_models_in_two_threads() -> None:
    results: dict[str, torch.dtype] = {}

    def work(name: str, format_name: str) -> None:
        model = applied(Net(), policy(("*", format_name), outputs="computed"))
        for _ in range(20):
            results[name] = run(model).dtype

    threads = [threading.Thread(target=work, args=(f, f)) for f in ("bf16", "fp16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"bf16": torch.bfloat16, "fp16": torch.float16}


def test_a_deep_copy_casts_by_itself() -> None:
    model = Net()
    precision = apply(model, policy(("*", "bf16"), outputs="computed"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.two.weight.zero_()
        twin.two.bias.zero_()
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    assert torch.equal(twin(x), x.bfloat16())
    precision.remove()
    assert run(model).dtype == torch.float32
    assert run(twin).dtype == torch.bfloat16
    with pytest.raises(ApplyError, match="already runs"):
        apply(twin, "fp32")
    with pytest.raises(ApplyError, match=r"save model.state_dict\(\), or call remove"):
        pickle.dumps(twin)
    with pytest.raises(ApplyError, match='pickling a model that runs policy "test": a policy is installed, not saved'):
        pickle.dumps(twin.two)
    twin.__dict__["_autoprec_precision"].remove()
    assert run(twin).dtype == torch.float32
    pickle.dumps(twin)


def test_an_fp32_policy_installs_nothing() -> None:
    model = Net()
    precision = apply(model, "fp32")
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not precision.casts
    with precision.loss():
        run(model)


def test_low_storage_changes_parameters_and_back() -> None:
    model = seeded_net()
    precision = apply(model, policy(("*", "bf16"), parameters=Parameters(storage="bf16")))
    weight = model.one.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    run(model).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    precision.remove()
    assert model.one.weight is weight
    assert weight.grad.dtype == weight.dtype == torch.float32
    assert torch.equal(weight, seeded_net().one.weight.bfloat16().float())


def test_low_storage_keeps_running_statistics() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
    apply(model, "low-bf16")
    model(torch.rand(2, 4, 3)).float().sum().backward()
    assert model[1].running_mean.dtype == torch.float32
    assert model[1].running_mean.abs().sum() > 0
    assert model[1].weight.grad is not None
    assert model[1].weight.grad.dtype == torch.bfloat16


def test_the_scaler_is_what_the_policy_says() -> None:
    scale = LossScale(kind="dynamic", initial=8.0, growth_interval=1, maximum=16.0, minimum=4.0)
    precision = apply(nn.Linear(1, 1), policy(("*", "fp32"), loss_scale=scale))
    assert precision.scaler.is_enabled()
    assert precision.scaler.get_scale() == 8.0
    assert not apply(nn.Linear(1, 1), "fp32").scaler.is_enabled()


def test_a_policy_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    save_policy(policy(("one", "bf16"), ("*", "fp32")), path)
    model = Net()
    assert apply(model, path).policy.rules[0].sites == "one"
    run(model)
    assert model.dtypes["one"] == torch.bfloat16


def refused(model: nn.Module, rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply(model, rules)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_is_refused(tmp_path: Path) -> None:
    refused(
        Net(),
        policy(("ones:softmax", "bf16"), ("*", "fp32")),
        ApplyError,
        r'rule "ones:softmax" of policy "test" matches no module of this Net; nearest modules: "one"',
    )
    refused(Net(), tmp_path / "none.yaml", PolicyFileError, "none.yaml")
    scaled = policy(("*", "fp16"), parameters=Parameters(storage="fp16"), loss_scale=LossScale(kind="dynamic"))
    refused(
        Net(),
        scaled,
        ApplyError,
        "stores parameters and gradients in fp16 and scales the loss.*use parameters: {storage: fp16, master: fp32}",
    )
    model = Net()
    first = apply(model, "autocast-bf16")
    with pytest.raises(ApplyError, match=r'already runs policy "autocast-bf16"; call remove\(\)'):
        apply(model, "fp32")
    first.remove()
    assert isinstance(apply(model, "fp32"), Precision)


# What a review found: each of these was wrong once.


def steps(optimizer_kind: Any, *, in_one_block: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = optimizer_kind(model.parameters())
    precision = apply(model, policy(("*", "bf16"), outputs="computed"))
    losses = []

    def step() -> None:
        with precision.loss():
            loss = run(model).float().square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    with precision.loss() if in_one_block else nullcontext():
        for _ in range(4):
            step()
    return losses


@pytest.mark.parametrize("fused", [True, False])
def test_weights_are_cast_anew_after_a_step_also_inside_one_loss_block(fused: bool) -> None:
    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1, fused=fused)

    losses = steps(adamw, in_one_block=True)
    assert losses == steps(adamw, in_one_block=False)
    assert losses[-1] < losses[0]


def test_an_edit_through_data_is_seen_by_the_next_forward() -> None:
    model = nn.Linear(4, 4)
    precision = apply(model, policy(("*", "bf16")))
    with precision.loss():
        run(model)
        model.weight.data.zero_()
        model.bias.data.zero_()
        assert run(model).abs().sum() == 0


def test_a_model_inside_the_loss_code_of_another_keeps_its_own_policy() -> None:
    teacher, student = Net(), nn.Linear(4, 4)
    apply(teacher, policy(("*:softmax", "fp32"), ("*", "bf16")))
    precision = apply(student, policy(("*", "fp16"), outputs="computed"))
    with precision.loss():
        run(teacher)
        assert run(student).dtype == torch.float16
        assert (torch.ones(1) * 2).dtype == torch.float16
    assert teacher.dtypes["softmax"] == torch.float32
    assert teacher.dtypes["one"] == torch.bfloat16


def test_part_of_a_model_cannot_have_a_policy_of_its_own() -> None:
    whole = nn.Sequential(nn.Linear(4, 4))
    part = apply(whole[0], policy(("*", "bf16")))
    refused_while_applied = r'module 0 already runs policy "test"'
    with pytest.raises(ApplyError, match=refused_while_applied):
        apply(whole, policy(("*", "bf16")))
    part.remove()
    apply(whole, policy(("*", "bf16")))
    with pytest.raises(ApplyError, match="the model already runs a policy"):
        apply(whole[0], policy(("*", "bf16")))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_renormalizes_its_weight(kind: Any) -> None:
    model = kind(4, 4, max_norm=1.0)
    model.weight.data.fill_(3.0)
    apply(model, policy(("*", "bf16")))
    model(torch.tensor([[0]]))
    assert model.weight[0].norm() <= 1.0001


def test_a_deep_copy_of_an_own_forward_runs_the_copy() -> None:
    model = nn.Linear(4, 4)
    model.forward = types.MethodType(lambda self, x: F.linear(x, self.weight), model)  # type: ignore[method-assign]
    apply(model, policy(("*", "bf16")))
    twin = copy.deepcopy(model)
    twin.weight.data.zero_()
    assert run(twin).abs().sum() == 0


def test_an_old_handle_removes_nothing_new() -> None:
    model = nn.Linear(4, 4)
    old = apply(model, policy(("*", "bf16")))
    old.remove()
    apply(model, policy(("*", "bf16"), outputs="computed"))
    old.remove()
    assert run(model).dtype == torch.bfloat16


def test_a_module_exchanged_since_gets_its_forward_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    first = model[0]
    precision = apply(model, policy(("*", "bf16")))
    model[0] = nn.Linear(4, 4)
    precision.remove()
    assert "forward" not in first.__dict__


@pytest.mark.parametrize("reentrant", [True, False])
def test_functional_code_under_checkpointing_is_cast_both_times(reentrant: bool) -> None:
    class Functional(nn.Module):
        def __init__(self, *, checkpointed: bool) -> None:
            super().__init__()
            self.linear, self.checkpointed = nn.Linear(4, 4), checkpointed

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(self.linear(x) * 1.7, dim=-1) * x.sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.5
            y = checkpoint(self.body, x, use_reentrant=reentrant) if self.checkpointed else self.body(x)
            return y * 0.3

    rules = policy((":mul#1", "fp32"), (":mul#3", "fp16"), ("*", "bf16"), outputs="computed")
    gradients = []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        model = Functional(checkpointed=checkpointed)
        apply(model, rules)
        output = model(torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_())
        assert output.dtype == torch.float16
        output.float().square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_outputs_are_cast_wherever_they_are_and_returned_as_they_are_if_nothing_changes() -> None:
    @dataclasses.dataclass(frozen=True)
    class Output:
        logits: torch.Tensor
        parts: dict[str, torch.Tensor]

    def run_it(x: torch.Tensor) -> Output:
        y = x * 2
        return Output(y, {"half": y.half(), "count": torch.ones(1, dtype=torch.int64)})

    result = low(run_it, torch.ones(2), rules=policy(("*", "bf16")))
    assert result.logits.dtype == result.parts["half"].dtype == torch.float32
    assert result.parts["count"].dtype == torch.int64
    wrapped = low(lambda x: collections.UserDict(y=x * 2), torch.ones(2), rules=policy(("*", "bf16")))
    assert wrapped["y"].dtype == torch.float32
    cache: list[Any] = [torch.ones(1), None]
    assert low(lambda x: cache, torch.ones(2), rules=policy(("*", "bf16"))) is cache


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
def test_torch_compile_with_a_graph_break_runs_the_policy() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    inner = Sites(lambda x: (x * 2) if x.sum().item() > 1e9 else (x * 3))
    model.append(inner)
    apply(model, policy(("*", "bf16"), outputs="computed"))
    compiled = torch.compile(model, backend="eager")
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    assert torch.equal(compiled(x), model(x))
    assert compiled(x).dtype == torch.bfloat16
    with pytest.raises(ApplyError, match="the model is compiled; apply the policy first"):
        apply(torch.compile(nn.Linear(4, 4), backend="eager"), "autocast-bf16")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_cast_is_refused() -> None:
    scripted = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    with pytest.raises(ApplyError, match='module "1" is a TorchScript module'):
        apply(nn.Sequential(nn.Linear(4, 4), scripted), "autocast-bf16")
    with pytest.raises(ApplyError, match="on the meta device; move it"):
        apply(nn.Linear(4, 4, device="meta"), "autocast-bf16")


def test_code_left_alone_still_gets_agreeing_dtypes() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        low_x = x * 2
        with torch.no_grad():
            return low_x @ torch.ones(2, 2)

    assert low(mixed, torch.ones(2, 2, requires_grad=True)).dtype == torch.float32


def test_out_and_masked_assignment_take_the_dtype_that_is_written_to() -> None:
    def into_buffer(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(2, 2)
        return torch.mm(x * 2, torch.ones(2, 2), out=buffer)

    assert low(into_buffer, torch.ones(2, 2)).dtype == torch.float32

    def masked(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(2)
        buffer[torch.tensor([True, False])] = (x * 3)[:1]
        return buffer

    assert low(masked, torch.ones(2)).tolist() == [3, 0]


def test_norm_weights_that_are_no_parameters_agree_with_the_statistics() -> None:
    model = nn.BatchNorm1d(4)
    apply(model, "low-bf16")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.functional_call(model, weights, (torch.rand(3, 4).bfloat16(),))
    assert model.running_mean is not None
    assert model.running_mean.abs().sum() > 0


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("kept", ["parameters", "all"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_statistics_serve_an_fp32_activation_and_are_kept_rounded(
    low: torch.dtype, kept: str, *, as_module: bool
) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm
            if as_module:
                return n(x)  # type: ignore[no-any-return]
            return F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, self.training)

    model, wide = Normed(), nn.BatchNorm1d(4)
    model.to(low)
    if kept == "parameters":
        model.norm.weight.data, model.norm.bias.data = torch.ones(4), torch.zeros(4)
    apply(model, policy(("*:batch_norm", "fp32"), ("*", "bf16"), outputs="computed"))
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        assert torch.equal(model(x), wide(x))
        wide.running_mean, wide.running_var = (each.to(low).float() for each in (wide.running_mean, wide.running_var))
    assert model.norm.running_var.dtype == low
    assert torch.equal(model.norm.running_var.float(), wide.running_var)
    assert torch.equal(model.norm.running_mean.float(), wide.running_mean)
    model.eval(), wide.eval()
    before = model.norm.running_mean._version
    assert torch.equal(model(x), wide(x))
    assert model.norm.running_mean._version == before, "evaluation writes nothing"


@pytest.mark.parametrize("compiles", [False, True])
def test_low_statistics_of_an_instance_norm_are_written_where_nothing_is_said(*, compiles: bool) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm
            return F.instance_norm(x, n.running_mean, n.running_var, n.weight, n.bias)

    model, wide, x = Normed().bfloat16(), Normed(), torch.rand(5, 4, 6)
    apply(model, policy(("*:instance_norm", "fp32"), ("*", "bf16"), outputs="computed"))
    run_it = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    assert torch.equal(run_it(x), wide(x))
    assert wide.norm.running_mean is not None
    assert wide.norm.running_mean.abs().sum() > 0
    assert torch.equal(model.norm.running_mean, wide.norm.running_mean.bfloat16())


def test_norm_parameters_stored_low_serve_an_fp32_activation() -> None:
    model = nn.LayerNorm(4)
    apply(model, policy(("*", "fp32"), parameters=Parameters(storage="bf16")))
    assert run(model).dtype == torch.float32


def test_casting_goes_on_after_a_backward_inside_the_loss_block() -> None:
    model = nn.Linear(4, 4)
    precision = apply(model, policy(("*", "bf16"), outputs="computed"))
    with precision.loss():
        run(model).sum().backward()
        assert (torch.ones(1) * 2).dtype == torch.bfloat16


def test_fp16_outputs_return_in_fp32() -> None:
    assert run(applied(Net(), policy(("*", "fp16")))).dtype == torch.float32


def test_matmul_precision_is_claimed_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.runtime import precision as module

    calls: list[Any] = []
    monkeypatch.setattr(module, "claim_float32_matmul", lambda kind, name: calls.append((kind, name)) or "claim")
    monkeypatch.setattr(module, "release_with", lambda _, claim: lambda: calls.append(claim))
    apply(nn.Linear(4, 4), policy(("*", "fp32"), float32_matmul="bf16")).remove()
    assert calls == [("cpu", "bf16"), "claim"]


def test_a_forgotten_model_gives_the_matmul_precision_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_precision, "_supported", lambda _: ("ieee", "bf16"))
    found = matmul_precision.internal_precision("cpu", "matmul")
    model = nn.Linear(4, 4)
    apply(model, policy(("*", "fp32"), float32_matmul="bf16"))
    assert matmul_precision.internal_precision("cpu", "matmul") == "bf16"
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert matmul_precision.internal_precision("cpu", "matmul") == "bf16", "the copy runs the policy too"
    del twin
    gc.collect()
    assert matmul_precision.internal_precision("cpu", "matmul") == found


def test_a_deep_copy_of_a_precision_has_a_model_and_a_loss_scale_of_its_own() -> None:
    model = Net()
    precision = apply(model, policy(("*", "fp16"), loss_scale=LossScale(kind="dynamic", initial=2.0**10)))
    precision.scaler.scale(torch.ones(1))
    precision.scaler.update(new_scale=64.0)
    twin = copy.deepcopy(precision)
    assert twin.model is not model
    assert twin.model.__dict__["_autoprec_precision"] is twin
    assert twin.scaler.get_scale() == 64.0
    twin.scaler.scale(torch.ones(1))
    twin.scaler.update(new_scale=32.0)
    assert precision.scaler.get_scale() == 64.0
    precision.remove()
    assert not precision.is_installed
    assert twin.is_installed
    assert not copy.deepcopy(precision).is_installed, "a removed one stays removed"
    for save in (pickle.dumps, copy.copy):
        with pytest.raises(ApplyError, match="a policy is installed, not saved"):
            save(twin)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(x) @ self.linear.weight, dim=-1)


def test_symbolic_tracing_is_refused() -> None:
    model, x = nn.Sequential(Functional()), torch.ones(2, 4)
    precision = apply(model, policy(("*", "bf16")))
    with pytest.raises(ApplyError, match="symbolic_trace: the model runs a policy, and the traced code would lack"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(ApplyError, match=r"trace with torch.export.export or make_fx"):
        torch.fx.symbolic_trace(model[0])
    holder = nn.Sequential(nn.Identity(), model)
    with pytest.raises(ApplyError, match="module 1 runs a policy"):
        torch.fx.symbolic_trace(holder)
    assert torch.equal(make_fx(model)(x)(x), model(x))
    precision.remove()
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_overloads_of_aten_ops_are_sites_like_any() -> None:
    assert low(lambda x: torch.ops.aten.mm(x, x), torch.ones(2, 2)).dtype == torch.bfloat16
    assert low(lambda x: torch.ops.aten.mm.default(x, x), torch.ones(2, 2)).dtype == torch.bfloat16
    assert low(lambda x: torch.ops.aten.add_.Tensor(x, x), torch.ones(2)).dtype == torch.float32


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_casts_by_its_own_model_alone() -> None:
    model = nn.Linear(4, 4)
    loss_in_fp32 = (Rule(sites="@loss", format="fp32"), Rule(sites="*", format="bf16"))
    precision = apply(model, Policy(name="test", rules=loss_in_fp32, outputs="computed"))
    x = torch.ones(2, 4)
    with precision.loss():
        child = os.fork()
        if child == 0:
            is_right = model(x).dtype == torch.bfloat16 and (x.bfloat16() @ x.bfloat16().T).dtype == torch.bfloat16
            os._exit(0 if is_right else 1)
        _, status = os.waitpid(child, 0)
        assert (x.bfloat16() @ x.bfloat16().T).dtype == torch.float32
    assert os.waitstatus_to_exitcode(status) == 0
