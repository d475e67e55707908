"""`apply`: what it casts, what it leaves alone, and that it can be taken back."""

import copy
import inspect
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoprec.errors import ApplyError, FormatError, PolicyFileError
from autoprec.policy import LossScale, Parameters, Policy, Rule, save_policy
from autoprec.runtime import Precision, apply


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
    refused(Net(), policy(("*", "fp8_e4m3")), FormatError, r'rule "\*" asks for fp8_e4m3, which this runtime cannot')
    refused(
        Net(),
        policy(("ones:softmax", "bf16"), ("*", "fp32")),
        ApplyError,
        r'rule "ones:softmax" of policy "test" matches no module of this Net; nearest modules: "one"',
    )
    refused(Net(), tmp_path / "none.yaml", PolicyFileError, "none.yaml")
    model = Net()
    first = apply(model, "autocast-bf16")
    with pytest.raises(ApplyError, match=r'already runs policy "autocast-bf16"; call remove\(\)'):
        apply(model, "fp32")
    first.remove()
    assert isinstance(apply(model, "fp32"), Precision)
