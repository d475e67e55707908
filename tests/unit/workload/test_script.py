from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autoprec.errors import WorkloadError
from autoprec.workload.script import missing, offers, workload_of

PAIRS = [(torch.ones(2, 3), torch.zeros(2, 1))]


def build(**names):
    return workload_of({"model": partial(nn.Linear, 3, 1), "batches": PAIRS, **names}, "script.py")


def test_a_script_needs_a_model_and_batches_and_no_more():
    assert offers({"build_model": 1, "train_loader": 2})
    assert missing({"criterion": 1, "model": None}) == ["model or build_model", "train_loader or batches"]


def test_the_first_name_of_a_pair_wins():
    workload = build(train_loader=[1], batches=[2], build_model=lambda: 0 / 0)
    assert list(workload.batches()) == [1]
    assert isinstance(workload.model(), nn.Linear)


def test_a_module_becomes_fresh_copies_of_the_untouched_original():
    original = nn.Linear(3, 1)
    workload = build(model=original)
    one, other = workload.model(), workload.model()
    with torch.no_grad():
        one.weight.zero_()
    assert one is not other is not original
    assert torch.equal(other.weight, original.weight)
    assert torch.equal(workload.model().weight, original.weight)
    assert original.weight.abs().sum() > 0


@pytest.mark.parametrize("model", [nn.Identity, lambda: nn.Identity(), partial(nn.Linear, 1, 1)])
def test_a_class_or_a_function_is_called(model):
    assert isinstance(build(model=model).model(), nn.Module)


def test_a_model_that_needs_arguments_is_refused():
    with pytest.raises(WorkloadError, match=r"script\.py: model needs the arguments in_features, out_features; "):
        build(model=nn.Linear)


@pytest.mark.parametrize("model", ["gpt", {"width": 3}])
def test_a_model_of_another_kind_is_refused(model):
    with pytest.raises(WorkloadError, match=r"script\.py: model is a (str|dict); it must be a torch\.nn\.Module, a"):
        build(model=model)


@pytest.mark.parametrize("batches", [PAIRS, lambda: iter(PAIRS), DataLoader(TensorDataset(*PAIRS[0]))])
def test_batches_of_every_kind_restart(batches):
    workload = build(batches=batches)
    first, again = list(workload.batches()), list(workload.batches())
    assert len(first) == len(again) > 0
    assert torch.equal(first[0][0], again[0][0])


def test_an_iterator_is_refused_as_it_can_be_read_once():
    with pytest.raises(WorkloadError, match=r"batches is a list_iterator; .* an iterator can be read only once"):
        build(batches=iter(PAIRS))


def test_batches_of_another_kind_are_refused():
    with pytest.raises(WorkloadError, match=r"batches is an int; it must be a data loader, a list, or a function"):
        build(batches=3)
    with pytest.raises(WorkloadError, match=r"batches needs the arguments split"):
        build(batches=lambda split: PAIRS)


@pytest.mark.parametrize("criterion", [nn.MSELoss(), F.mse_loss, lambda output, target: F.mse_loss(output, target)])
@pytest.mark.parametrize("name", ["loss_fn", "criterion"])
def test_a_criterion_gets_output_and_target(name, criterion):
    model, (x, y) = nn.Linear(3, 1), PAIRS[0]
    loss = build(**{name: criterion}).loss(model, (x, y))
    assert torch.equal(loss, F.mse_loss(model(x), y))


def test_a_criterion_gets_the_last_of_several_as_the_target():
    class Sum(nn.Module):
        def forward(self, a, b):
            return a + b

    loss = build(criterion=F.mse_loss).loss(Sum(), [torch.ones(2), torch.ones(2), torch.zeros(2)])
    assert loss.item() == 4.0


@pytest.mark.parametrize("first", ["model", "net", "network"])
def test_a_function_of_the_model_gets_model_and_batch(first):
    function = eval(f"lambda {first}, batch: ({first}, batch)")
    assert build(loss_fn=function).loss("the model", "the batch") == ("the model", "the batch")


def test_a_criterion_with_buffers_follows_the_target_to_its_device():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    target = torch.zeros(2, dtype=torch.int64, device="meta")
    loss = build(criterion=criterion).loss(nn.Linear(3, 3, device="meta"), (torch.ones(2, 3, device="meta"), target))
    assert (loss.device.type, criterion.weight.device.type) == ("meta", "meta")


@pytest.mark.parametrize("batch", [{"x": 1, "y": 2}, torch.ones(2), (torch.ones(2),)])
def test_a_criterion_refuses_batches_that_are_no_pair(batch):
    with pytest.raises(
        WorkloadError, match=r"criterion is called as criterion\(model\(\*inputs\), target\), but a batch"
    ):
        build(criterion=F.mse_loss).loss(nn.Identity(), batch)


@pytest.mark.parametrize("criterion", [nn.MSELoss, 3])
def test_a_criterion_that_is_a_class_or_a_value_is_refused(criterion):
    with pytest.raises(WorkloadError, match=r"criterion is (the class MSELoss|an int); it must be a function"):
        build(criterion=criterion)


def test_an_optimizer_keeps_its_groups_and_options_for_every_copy():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    decayed = [each for each in model.parameters() if each.ndim == 2]
    plain = [each for each in model.parameters() if each.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "lr": 0.02}], lr=0.1, betas=(0.8, 0.9)
    )
    workload = build(model=model, optimizer=optimizer)
    copy = workload.model()
    made = workload.optimizer(copy.parameters())
    assert type(made) is torch.optim.AdamW
    for group, original in zip(made.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in original.items() if k != "params"}
    assert [id(each) for each in made.param_groups[0]["params"]] == [id(copy[0].weight), id(copy[1].weight)]


def test_a_made_optimizer_steps_as_the_original_would():
    model = nn.Linear(3, 1)
    workload = build(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    copy = workload.model()
    made = workload.optimizer(copy.parameters())
    for module, optimizer in ((copy, made), (model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))):
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert torch.equal(copy.weight, model.weight)


def test_an_optimizer_class_or_function_is_called():
    params = list(nn.Linear(3, 1).parameters())
    assert isinstance(build(optimizer=torch.optim.SGD).optimizer(params), torch.optim.SGD)
    assert build(optimizer=lambda each: len(each)).optimizer(params) == 2


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters())
    with pytest.raises(WorkloadError, match=r"optimizer holds parameters that are not the module-level model's"):
        build(model=nn.Linear(3, 1), optimizer=optimizer)
    with pytest.raises(WorkloadError, match=r"optimizer holds parameters that are not the module-level model's"):
        build(optimizer=optimizer)


def test_an_optimizer_for_fewer_parameters_than_it_had_is_refused():
    model = nn.Linear(3, 1)
    workload = build(model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(WorkloadError, match="of more parameters than the 1 it now gets"):
        workload.optimizer([model.weight])


def test_an_optimizer_of_another_kind_is_refused():
    with pytest.raises(
        WorkloadError, match=r"optimizer is a str; it must be a torch optimizer, its class, or a function"
    ):
        build(optimizer="adam")
