import pytest
import torch
from torch import nn

from autoprec.analysis.loss_scale import run_backward
from autoprec.analysis.storage import (
    Storage,
    eps_vanishes,
    frozen_parameters,
    second_moment_freezes,
    stalled_statistics,
    storage_of,
)
from autoprec.capture import record
from tests.unit.analysis.workloads import norms

FORMATS = ("fp16", "bf16")


class Two(nn.Module):
    """Two parameters with known values and gradients."""

    def __init__(self, values: list[float], gradient: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))
        self.weight.grad = torch.full_like(self.weight, gradient)
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))


def sgd(lr: float) -> object:
    return lambda params: torch.optim.SGD(params, lr=lr)


def test_an_update_below_half_a_spacing_is_lost() -> None:
    # The step down is 2**-10. Below 1, bf16 steps by 2**-8, so 1 stays; below 0.125 by 2**-11, so 0.125 moves.
    # fp16 steps by 2**-11 and 2**-14 there.
    storage = storage_of(Two([1.0, 0.125], 1.0), sgd(2.0**-10), FORMATS)
    assert storage.parameters[0].lost_update_frac == {"fp16": 0, "bf16": 0.5}
    assert frozen_parameters(storage, "bf16") == ()


def test_a_parameter_that_does_not_move_at_all_is_named() -> None:
    # Below 1, fp16 steps by 2**-11 and bf16 by 2**-8.
    storage = storage_of(Two([1.0, 1.0], 1.0), sgd(2.0**-11), FORMATS)
    assert frozen_parameters(storage, "bf16") == ("weight",)
    assert frozen_parameters(storage, "fp16") == ()


def test_elements_without_a_gradient_do_not_count() -> None:
    model = Two([1.0, 1.0, 0.125, 1.0], 1.0)
    model.weight.grad = torch.tensor([1.0, 0.0, 1.0, 0.0])
    storage = storage_of(model, sgd(2.0**-10), FORMATS)
    assert storage.parameters[0].lost_update_frac == {"fp16": 0, "bf16": 0.5}


def test_a_parameter_without_a_gradient_is_not_called_frozen() -> None:
    storage = storage_of(Two([1.0], 0.0), sgd(1e-3), FORMATS)
    assert frozen_parameters(storage, "bf16") == ()


def test_sizes_follow_the_format() -> None:
    recording = record(norms())
    run_backward(recording)
    storage = storage_of(recording.model, lambda params: torch.optim.Adam(params), FORMATS)
    num_parameters = (4 * 8 + 8) + 2 * 8 + 2 * 8 + (8 * 2 + 2)
    assert storage.num_bytes("parameters", "fp32") == 4 * num_parameters
    assert storage.num_bytes("gradients", "bf16") == 2 * num_parameters
    assert storage.num_bytes("optimizer_state", "fp32") == 2 * 4 * num_parameters
    assert storage.num_bytes("buffers", "fp16") == 2 * (8 + 8)
    assert (storage.optimizer, storage.measured) == ("Adam", True)


@pytest.mark.parametrize(
    ("make", "num_state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 6),
    ],
)
def test_state_is_counted_not_assumed(make: object, num_state: int) -> None:
    assert storage_of(Two([1.0, 2.0], 1.0), make, FORMATS).parameters[0].num_state_elements == num_state


def test_the_model_is_left_as_it_was() -> None:
    model = Two([1.0, 2.0], 1.0)
    storage_of(model, sgd(0.5), FORMATS)
    assert model.weight.tolist() == [1.0, 2.0]
    assert model.weight.grad.tolist() == [1.0, 1.0]


def test_only_floating_buffers_are_stored_in_a_format() -> None:
    storage = storage_of(Two([1.0], 1.0), sgd(0.1), FORMATS)
    assert [each.name for each in storage.buffers] == ["table"]
    assert storage.buffers[0].momentum is None


def test_an_optimizer_that_wants_a_closure_leaves_updates_unmeasured() -> None:
    storage = storage_of(Two([1.0], 1.0), lambda params: torch.optim.LBFGS(params), FORMATS)
    assert not storage.measured
    assert storage.parameters[0].lost_update_frac == {}
    assert frozen_parameters(storage, "bf16") == ()


def facts(**changes: object) -> Storage:
    recording = record(norms(**changes))
    run_backward(recording)
    return storage_of(recording.model, lambda params: torch.optim.Adam(params, lr=1e-3, **changes), FORMATS)


def test_running_statistics_stall_if_momentum_is_below_the_rounding() -> None:
    """The unit roundoff is 2**-8 in bf16 and 2**-11 in fp16; the momentum of the workload is 1e-3, about 2**-10."""
    storage = facts()
    assert stalled_statistics(storage, "bf16") == ("1.running_mean", "1.running_var")
    assert stalled_statistics(storage, "fp16") == ()


@pytest.mark.parametrize(
    ("beta2", "bf16", "fp16"), [(0.99, False, False), (0.997, False, False), (0.999, True, False), (0.9999, True, True)]
)
def test_the_second_moment_freezes_where_rounding_brings_it_back(beta2: float, bf16: bool, fp16: bool) -> None:
    storage = facts(betas=(0.9, beta2))
    assert second_moment_freezes(storage, "bf16") == bf16
    assert second_moment_freezes(storage, "fp16") == fp16
    for fmt, dtype, frozen in (("bf16", torch.bfloat16, bf16), ("fp16", torch.float16, fp16)):
        v = torch.linspace(1, 2, 4097)[:-1].to(dtype)
        assert bool(((v.float() * beta2).to(dtype) == v).all()) == frozen, fmt


def test_the_optimizers_eps_vanishes_in_fp16() -> None:
    assert eps_vanishes(facts(), "fp16")
    assert not eps_vanishes(facts(), "bf16")
    assert not eps_vanishes(facts(eps=1e-4), "fp16")
    assert not eps_vanishes(storage_of(Two([1.0], 1.0), sgd(0.1), FORMATS), "fp16")
