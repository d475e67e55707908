import math

import pytest
import torch
from torch import nn

from autoprec.analysis.storage import Storage, frozen_parameters, storage_of
from autoprec.capture import record
from autoprec.workload import Workload
from tests.unit.analysis.stored_runs import Make, adam, sgd, workload_of
from tests.unit.analysis.workloads import norms

FORMATS = ("fp16", "bf16")


def storage(workload: Workload) -> Storage:
    return storage_of((record(workload),), workload, FORMATS)


def of(values: list[float], gradients: list[float], make: Make) -> Storage:
    return storage(workload_of(values, [gradients], make))


def test_sizes_follow_the_format() -> None:
    found = storage(norms())
    num_parameters = (4 * 8 + 8) + 2 * 8 + 2 * 8 + (8 * 2 + 2)
    assert found.num_bytes("parameters", "fp32") == 4 * num_parameters
    assert found.num_bytes("gradients", "bf16") == 2 * num_parameters
    assert found.num_bytes("optimizer_state", "fp32") == 2 * 4 * num_parameters
    assert found.num_bytes("buffers", "fp16") == 2 * (8 + 8)
    assert (found.optimizer, found.measured, found.num_steps) == ("Adam", True, 3)


@pytest.mark.parametrize(
    ("make", "num_state"),
    [(sgd(0.1), 0), (sgd(0.1, momentum=0.9), 2), (lambda p: torch.optim.AdamW(p, amsgrad=True), 6)],
)
def test_state_is_counted_not_assumed(make: Make, num_state: int) -> None:
    assert of([1.0, 2.0], [1.0, 1.0], make).parameters[0].num_state_elements == num_state


def test_the_recorded_model_is_left_as_it_was() -> None:
    workload = norms()
    recording = record(workload)
    before = {name: value.clone() for name, value in recording.model.state_dict().items()}
    storage_of((recording,), workload, FORMATS)
    assert all(torch.equal(value, before[name]) for name, value in recording.model.state_dict().items())
    assert all(parameter.grad is None for parameter in recording.model.parameters())
    assert recording.replay_matches


def test_steps_start_from_the_values_of_the_recorded_model() -> None:
    # Half a spacing below 1 is 2**-9 in bf16: steps of 2**-10 do not move 1 and do move 1 / 16.
    workload = workload_of([1.0], [[1.0]], sgd(2.0**-10))
    recording = record(workload)
    with torch.no_grad():
        recording.model.weight.fill_(1 / 16)
    found = storage_of((recording,), workload, FORMATS)
    assert found.parameters[0].lost_update_frac == {"fp16": 0, "bf16": 0}


def test_only_floating_buffers_are_stored_in_a_format() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.zeros(3))
            self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    workload = Workload(
        model=Counted, batches=lambda: [torch.ones(2)], loss=lambda model, x: (model.weight * x).sum()
    )  # fmt: skip
    assert [(each.name, each.momentum) for each in storage(workload).buffers] == [("table", None)]


def test_an_optimizer_that_wants_a_closure_leaves_updates_unmeasured() -> None:
    found = of([1.0], [1.0], lambda params: torch.optim.LBFGS(params))
    assert not found.measured
    assert found.parameters[0].lost_update_frac == {}
    assert frozen_parameters(found, "bf16") == ()
    assert {each.part for each in found.parts()} == {"gradients", "parameters"}  # the latter by their rounding


def test_a_parameter_that_no_gradient_reaches_is_not_called_frozen() -> None:
    assert frozen_parameters(of([1.0], [0.0], sgd(1e-3)), "bf16") == ()


def test_the_verdict_on_a_part_is_that_on_its_worst_tensor() -> None:
    found = storage(norms(lr=1e-3))
    parts = {(each.part, each.format): each for each in found.parts()}
    assert parts["exp_avg_sq", "bf16"].verdict == "needs_fp32"
    assert parts["exp_avg", "bf16"].verdict == "fine"
    statistics = parts["buffers", "bf16"]  # their momentum is 1e-3
    assert (statistics.verdict, set(statistics.names)) == ("needs_fp32", {"1.running_mean", "1.running_var"})
    weights = parts["parameters", "bf16"]
    assert weights.verdict == "needs_master"
    assert {"1.weight", "2.weight"} <= set(weights.names)
    assert (weights.num_tensors, parts["exp_avg", "bf16"].num_tensors) == (8, 8)


def test_settings_of_the_optimizer_are_read() -> None:
    found = of([1.0], [1.0], adam(lr=0.5, eps=1e-3, betas=(0.9, 0.97)))
    assert (found.lr, found.eps, found.second_moment_decay) == (0.5, 1e-3, 0.97)
    without = of([1.0], [1.0], sgd(0.1))
    assert (without.eps, without.second_moment_decay) == (None, None)


def test_sparse_gradients_are_sampled() -> None:
    workload = Workload(
        model=lambda: nn.Embedding(10, 3, sparse=True), batches=lambda: [torch.tensor([1, 2, 2])],
        loss=lambda model, x: model(x).sum(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip
    found = storage(workload)
    assert found.measured
    assert set(found.parameters[0].lost_update_frac) == {"fp16", "bf16"}


def test_a_run_that_diverges_is_followed_as_far_as_it_goes() -> None:
    def diverging(lr: float) -> Workload:
        return Workload(
            model=lambda: nn.Linear(2, 1), batches=lambda: [torch.ones(4, 2)],
            loss=lambda model, x: model(x).pow(4).sum(), optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        )  # fmt: skip

    assert storage(diverging(1e15)).num_steps == 1  # then the loss is infinite
    assert not storage(diverging(math.inf)).measured  # after one step the weights are
