"""Channels last: which parameters lie so, what stays as it was, and that it can be taken back exactly."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.policy import LossScale, Parameters, Policy, Rule
from autoprec.runtime import Precision, apply
from autoprec.runtime.checkpoint import policy_hash


def policy(form: str = "fp32", **settings: Any) -> Policy:
    rules = (Rule(sites="*:linear", format="fp32"), Rule(sites="*", format=form))
    return Policy(name="p", rules=rules, memory_format="channels_last", **settings)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1))
    return nn.Sequential(*convolutions, nn.ConvTranspose2d(6, 4, 2), nn.Flatten(), nn.Linear(4 * 49, 3))


def images(step: int) -> torch.Tensor:
    return torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision | None, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(images(step)).square().mean()
        if precision is None:
            loss.backward()
            optimizer.step()
        else:
            precision.backward(loss)
            precision.step(optimizer)
        losses.append(loss.item())
    return losses


def facts(model: nn.Module) -> list[tuple[int, tuple[int, ...]]]:
    return [(id(parameter), parameter.stride()) for parameter in model.parameters()]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_of_convolutions_lie_channels_last_and_come_back() -> None:
    model, found = net(), net()
    before, names = facts(model), [name for name, p in model.named_parameters() if p.dim() == 4]
    with apply(model, policy()) as precision:
        assert names == ["0.weight", "3.weight", "4.weight"]
        for name in names:
            weight = model.get_parameter(name)
            assert weight.is_contiguous(memory_format=torch.channels_last)
            channels = weight.shape[1]
            assert weight.stride() == (weight[0].numel(), 1, weight.shape[3] * channels, channels)
        assert [key for key, _ in facts(model)] == [key for key, _ in before]
        assert same(model.state_dict(), found.state_dict())
        assert not precision.casts, "an fp32 policy replaces no forward"
        assert model[0](images(0)).is_contiguous(memory_format=torch.channels_last), "the kernels follow the weight"
    assert facts(model) == before
    assert same(model.state_dict(), found.state_dict())


def test_three_dimensions_lie_channels_last_too() -> None:
    model = nn.Conv3d(3, 4, 2)
    with apply(model, policy()):
        assert model.weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert not model.weight.is_contiguous()
    assert model.weight.is_contiguous()


def test_training_differs_from_fp32_by_rounding_alone() -> None:
    plain, model = net(), net()
    precision = apply(model, policy())
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), None, range(5))
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, range(5))
    # Sums of at most 196 products in another order: 2^-24 times their number, and a margin of 4 for five steps.
    assert losses == pytest.approx(expected, rel=4 * 196 * 2.0**-24)


def test_gradients_and_state_of_a_running_optimizer_follow() -> None:
    plain, model = net(), net()
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, fused=True) for each in (model, plain))
    train(model, ours, None, range(2))
    train(plain, theirs, None, range(2))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with apply(model, policy()) as precision:
        kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert same(kept, gradients)
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters())
        train(model, ours, precision, range(2, 4))
    train(model, ours, None, range(4, 6))
    train(plain, theirs, None, range(2, 6))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        # Weights and gradients below 2, sums of at most 196 products in another order, and what six steps make of it.
        assert (one - other).abs().max() < 2 * 196 * 6 * 2.0**-24


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_checkpoint_of_another_layout_goes_on_exactly_in_a_fused_optimizer(kind: Any) -> None:
    """torch's fused kernels pair numbers by their place in memory, and a checkpoint brings its own layout."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    parameters = [nn.Parameter(torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))) for _ in range(2)]
    models = [nn.ParameterList([parameter]) for parameter in parameters]
    apply(models[0], policy())
    gradient = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    optimizers = [kind(model.parameters(), lr=0.1, fused=True, **options) for model in models]
    for steps in (1, 2):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            for step in range(steps):
                parameter.grad = gradient * (1 + step)
                optimizer.step()
        optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    assert torch.equal(parameters[0], parameters[1])


def test_a_deep_copy_has_the_layout_and_its_own_way_back() -> None:
    model = net()
    before = [parameter.stride() for parameter in model.parameters()]
    precision = apply(model, policy())
    twin = copy.deepcopy(model)
    assert [p.stride() for p in twin.parameters()] == [p.stride() for p in model.parameters()] != before
    twin.__dict__["_autoprec_precision"].remove()
    assert [p.stride() for p in twin.parameters()] == before
    assert model[0].weight.stride() != before[0]
    precision.remove()


def test_a_state_dict_keeps_the_layout_of_the_model_that_loads_it() -> None:
    model, plain = net(), net()
    with torch.no_grad():
        plain[0].weight.mul_(2)
    precision = apply(model, policy())
    strides = [parameter.stride() for parameter in model.parameters()]
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert [p.stride() for p in model.parameters()] == strides
    assert same(model.state_dict(), plain.state_dict())
    precision.load_state_dict(precision.state_dict())


def test_a_policy_that_says_nothing_of_it_has_the_hash_that_it_had() -> None:
    as_given = Policy(name="p", rules=policy().rules)
    assert policy_hash(as_given) == "e6d003498deea02f"
    assert policy_hash(policy()) != policy_hash(as_given)


@pytest.mark.parametrize("storage", [{"storage": "bf16"}, {"storage": "bf16", "master": "fp32"}])
def test_parameters_stored_low_and_their_masters_lie_so_too(storage: dict[str, str]) -> None:
    model, found = net(), net()
    with apply(model, policy("bf16", parameters=Parameters(**storage), loss_scale=LossScale())) as precision:
        weight = model[0].weight
        assert weight.dtype == torch.bfloat16
        assert weight.stride() == (9, 1, 3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        train(model, optimizer, precision, range(2))
        assert all(
            value.stride() == (9, 1, 3, 1)
            for value in precision.storage.masters().values()
            if value.dim() == 4 and value.shape == weight.shape
        )
    assert facts(model)[0][1] == facts(found)[0][1]
    assert model[0].weight.dtype == torch.float32


def test_a_compiled_model_keeps_the_layout() -> None:
    model = nn.Conv2d(3, 4, 3)
    apply(model, policy("bf16"))
    expected = model(torch.ones(2, 3, 5, 5))
    compiled = torch.compile(model, backend="aot_eager")
    found = compiled(torch.ones(2, 3, 5, 5))
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)


def test_sharded_parameters_are_refused() -> None:
    class Sharded(nn.Parameter):
        """Stands for a DTensor, which needs a process group."""

        def to_local(self) -> torch.Tensor:
            return self.data

    model = nn.Module()
    model.weight = Sharded(torch.ones(2, 2, 2, 2))
    with pytest.raises(ApplyError, match=r'memory_format: channels_last and parameter "weight" is sharded'):
        apply(model, policy())
    assert apply(model, Policy(name="p", rules=(Rule(sites="*", format="fp32"),))).is_installed
