"""Parameters stored low: what is stored how, what an edit does, and that it can be taken back exactly."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.runtime import apply
from autoprec.runtime.stored import STORED
from tests.unit.runtime.storing import MASTER, STOCHASTIC, batch, net, same, storing, train, weights


def sgd(model: nn.Module, lr: float = 0.1, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


@pytest.mark.parametrize("settings", [{"storage": "bf16"}, MASTER, STOCHASTIC, {"storage": "fp16", "master": "fp32"}])
def test_parameters_lie_in_the_storage_format_and_gradients_where_the_policy_says(settings: dict[str, str]) -> None:
    model = net()
    before = weights(model)
    precision = apply(model, storing(**settings))
    low = torch.float16 if settings["storage"] == "fp16" else torch.bfloat16
    assert same(weights(model), [w.to(low) for w in before])
    addresses = [p.data_ptr() for p in model.parameters()]
    train(model, sgd(model), precision, range(2))
    wide = torch.float32 if len(settings) > 1 else low
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {wide}
    assert {p.dtype for p in model.parameters()} == {low}
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_gradients_can_follow_the_storage() -> None:
    model = net()
    precision = apply(model, storing(**MASTER, gradients="storage"))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, precision, range(2))
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


def test_wide_gradients_do_not_swamp_micro_batches() -> None:
    """1 + 2^-9 rounds to 1 in bf16: a hundred such micro-batches vanish there, and stay in FP32."""
    model = nn.Linear(1, 1, bias=False)
    apply(model, storing(**MASTER))
    for gradient in (1.0, *[2.0**-9] * 100):
        (model.weight * gradient).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 1 + 100 * 2.0**-9


def test_keep_names_parameters_that_stay_fp32_by_any_of_their_names() -> None:
    model = net()
    model.append(model[0])  # "4.weight" is "0.weight"
    apply(model, storing(**MASTER, keep=["1.*", "4.weight", "*.bias"]))
    low = [name for name, p in model.named_parameters() if p.dtype == torch.bfloat16]
    assert low == ["3.weight"]
    assert model[0].weight not in STORED


def test_batch_norm_modules_stay_fp32_whatever_their_names() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2)))
    with apply(model, storing(**MASTER, batch_norm="fp32")):
        fp32 = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
        assert fp32 == {"1.weight", "1.bias", "2.0.weight", "2.0.bias"}
    with apply(nn.Linear(2, 2), storing(**MASTER, batch_norm="fp32")) as without:
        assert {parameter.dtype for parameter in without.model.parameters()} == {torch.bfloat16}


def test_keep_that_names_nothing_is_refused_and_changes_nothing() -> None:
    model = net()
    with pytest.raises(ApplyError, match=r'"3\.weigth" of parameters\.keep matches no parameter.*nearest.*"3\.weight"'):
        apply(model, storing(**MASTER, keep=["3.weigth"]))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    apply(model, storing(**MASTER)).remove()


def test_the_master_is_the_parameter_as_it_was_and_removing_gives_it_back() -> None:
    model = net()
    before = weights(model)
    apply(model, storing(**MASTER)).remove()
    assert same(weights(model), before)


def test_removing_gives_the_trained_master_and_keeps_gradients() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    train(model, sgd(model), precision, range(3))
    masters = precision.state_dict()["masters"]
    gradients = [p.grad for p in model.parameters()]
    rounded = weights(model)
    precision.remove()
    assert same(weights(model), [masters[name] for name, _ in model.named_parameters()])
    assert same([w.bfloat16() for w in weights(model)], rounded)
    assert not same(weights(model), [w.float() for w in rounded])
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("make", [sgd, lambda model: torch.optim.AdamW(model.parameters(), foreach=True)])
def test_what_is_applied_and_removed_trains_on_as_if_never_applied(make) -> None:  # type: ignore[no-untyped-def]
    gc.collect()  # models of other tests
    model = net()
    precision = apply(model, storing(**MASTER))
    train(model, make(model), precision, range(1))
    precision.remove()
    assert len(STORED) == 0
    optimizer = make(model)
    model(batch(0)).sum().backward()
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not optimizer._optimizer_step_pre_hooks


EDITS = {
    "in place": lambda p, value: p.detach().copy_(value),
    "through data": lambda p, value: p.data.copy_(value),
    "of one element": lambda p, value: p.data.view(-1)[0].copy_(value.view(-1)[0]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_stored_weight_counts(edit: str) -> None:
    """With lr 0 a step leaves the weights alone; a stale master would undo the edit."""
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = sgd(model, lr=0.0)
    train(model, optimizer, precision, range(2))
    weight = model[0].weight
    master = precision.state_dict()["masters"]["0.weight"].clone()
    EDITS[edit](weight, torch.full((16, 8), 3.0))
    edited = weight.detach().clone()
    train(model, optimizer, precision, range(1))
    assert torch.equal(weight.detach(), edited)
    after = precision.state_dict()["masters"]["0.weight"]
    assert torch.equal(after, torch.where(edited == master.bfloat16(), master, edited.float()))


def test_loading_a_state_dict_into_the_model_counts() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = sgd(model, lr=0.0)
    train(model, optimizer, precision, range(1))
    other = {name: tensor.bfloat16() for name, tensor in net(seed=1).state_dict().items()}
    model.load_state_dict(other)
    train(model, optimizer, precision, range(1))
    assert same(list(model.state_dict().values()), list(other.values()))


def test_not_a_number_in_a_weight_stays_one() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    model[0].weight.data.fill_(float("nan"))
    train(model, sgd(model), precision, range(2))
    assert model[0].weight.isnan().all()
    model[0].weight.data.fill_(1.0)
    assert torch.equal(precision.state_dict()["masters"]["0.weight"], torch.ones(16, 8))


def test_a_tied_parameter_has_one_master() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    precision = apply(model, storing(**MASTER))
    assert model[1].weight is model[0].weight
    assert list(precision.state_dict()["masters"]) == ["0.weight"]


def test_frozen_integer_and_double_parameters() -> None:
    model = net()
    model[0].requires_grad_(False)
    model.counts = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    model.exact = nn.Parameter(torch.ones(2, dtype=torch.float64))
    precision = apply(model, storing(**MASTER))
    assert (model.counts.dtype, model.exact.dtype) == (torch.int64, torch.float64)
    assert model[0].weight.dtype == torch.bfloat16
    assert "0.weight" not in precision.state_dict()["masters"]
    optimizer = sgd(model, lr=1e-4)
    train(model, optimizer, precision, range(1))
    model[0].requires_grad_(True)
    before = model[0].weight.detach().float()
    train(model, optimizer, precision, range(1))
    assert model[0].weight.grad is not None
    expected = before - 1e-4 * model[0].weight.grad
    assert torch.equal(precision.state_dict()["masters"]["0.weight"], expected)


def test_a_parameter_frozen_later_stays() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = sgd(model)
    train(model, optimizer, precision, range(1))
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    train(model, optimizer, precision, range(3))
    assert torch.equal(model[0].weight.detach(), before)


def test_a_parameter_added_later_is_as_it_was_made() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    model.append(nn.Linear(4, 4))
    optimizer = sgd(model)
    train(model, optimizer, precision, range(2))
    assert {p.dtype for p in model[4].parameters()} == {torch.float32}
    assert "4.weight" not in precision.state_dict()["masters"]


def test_a_copy_has_masters_of_its_own() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    train(model, sgd(model), precision, range(2))
    twin = copy.deepcopy(model)
    other = twin.__dict__["_autoprec_precision"]
    masters = precision.state_dict()["masters"]
    kept = {name: master.clone() for name, master in masters.items()}
    assert all(torch.equal(other.state_dict()["masters"][name], master) for name, master in kept.items())
    train(twin, sgd(twin), other, range(3))
    assert {p.grad.dtype for p in twin.parameters() if p.grad is not None} == {torch.float32}
    assert all(torch.equal(precision.state_dict()["masters"][name], master) for name, master in kept.items())
    assert not torch.equal(other.state_dict()["masters"]["0.weight"], kept["0.weight"])
    precision.remove()
    train(twin, sgd(twin), other, range(1))
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}


def test_a_copy_goes_on_rounding_alike() -> None:
    model = net()
    precision = apply(model, storing(**STOCHASTIC))
    train(model, sgd(model), precision, range(2))
    twin = copy.deepcopy(model)
    train(model, sgd(model), precision, range(2))
    train(twin, sgd(twin), twin.__dict__["_autoprec_precision"], range(2))
    assert same(weights(model), weights(twin))


def test_a_model_that_is_dropped_is_freed() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = sgd(model)
    train(model, optimizer, precision, range(1))
    weight = weakref.ref(model[0].weight)
    del model, precision, optimizer
    gc.collect()
    assert weight() is None
    assert len(STORED) == 0


def test_casting_the_model_under_the_policy_is_refused_at_the_next_step() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    optimizer = sgd(model)
    model[0].half()
    with pytest.raises(
        ApplyError, match=r'parameter "0\.weight" is torch\.float16 and the policy stores it as torch\.bf'
    ):
        optimizer.step()
    precision.remove()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_parameters_that_took_the_place_of_stored_ones_are_refused() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    model.load_state_dict({k: v.bfloat16() for k, v in net(1).state_dict().items()}, assign=True)
    with pytest.raises(ApplyError, match=r'parameter "0\.weight" of the model is not the one.*fully_shard'):
        sgd(model).step()
    precision.remove()


@pytest.mark.filterwarnings("ignore")  # torch's own on process groups
def test_a_wrapped_model_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(
            ApplyError, match=r"is wrapped in DistributedDataParallel.*apply the policy to model\.module"
        ):
            apply(wrapped, storing(**MASTER))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("shape", "offset"), [((4, 4), 1), ((3, 3), 0), ((0, 4), 0), ((), 0)])
def test_parameters_of_any_shape_that_lie_anywhere(shape: tuple[int, ...], offset: int) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(shape))
    precision = apply(model, storing(**MASTER))
    flat = torch.zeros(offset + model.weight.numel(), dtype=torch.bfloat16)
    model.weight.data = flat[offset:].view(shape).copy_(model.weight.data)  # as frameworks do that flatten weights
    model.weight.grad = torch.full(shape, 2.0**-10)
    sgd(model, lr=1.0).step()
    assert torch.equal(precision.state_dict()["masters"]["weight"], torch.full(shape, 1 - 2.0**-10))
    model.weight.data.fill_(2.0)
    assert torch.equal(precision.state_dict()["masters"]["weight"], torch.full(shape, 2.0))


def test_a_copy_refuses_exchanged_parameters_too() -> None:
    model = net()
    precision = apply(model, storing(**MASTER))
    twin = copy.deepcopy(model)
    precision.remove()
    twin.load_state_dict({k: v.bfloat16() for k, v in net(1).state_dict().items()}, assign=True)
    with pytest.raises(ApplyError, match="is not the one that the policy stored low"):
        sgd(twin).step()
