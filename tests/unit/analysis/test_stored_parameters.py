import pytest
import torch

from autoprec.analysis.stored_parameters import parameter_faults
from tests.unit.analysis.stored_runs import only, run_of, sgd

FORMATS = ("fp16", "bf16")


def faults(values: list[float], gradient: float | list[float], lr: float = 1.0, **settings: float) -> list:
    gradient = gradient if isinstance(gradient, list) else [gradient] * len(values)
    return list(parameter_faults(run_of(values, [gradient], sgd(lr, **settings)), (*FORMATS, "fp8_e4m3")))


def test_an_update_below_half_a_spacing_is_lost() -> None:
    # Three steps down of 2**-10. Below 1, bf16 steps by 2**-8, so 1 stays; below 0.125 by 2**-11, so 0.125 moves.
    # fp16 steps by 2**-11 and 2**-14 there.
    found = faults([1.0, 0.125], 2.0**-10)
    assert only(found, "bf16").numbers["lost_update_frac"] == 0.5
    assert only(found, "fp16").numbers["lost_update_frac"] == 0
    assert only(found, "fp16").numbers["kept_movement"] == pytest.approx(1)
    # Of the square of the way, 1 and 0.125 made as much: half of it is kept.
    assert only(found, "bf16").numbers["kept_movement"] == pytest.approx(0.5)


def test_a_parameter_that_does_not_move_needs_masters() -> None:
    found = faults([1.0, 1.0], 2.0**-11)
    assert only(found, "bf16").verdict == "needs_master"
    assert only(found, "bf16").reason.startswith("no element moves in 3 steps")
    assert only(found, "fp16").verdict == "fine"


def test_elements_without_a_gradient_do_not_count() -> None:
    found = faults([1.0, 1.0, 0.125, 1.0], [2.0**-10, 0.0, 2.0**-10, 0.0])
    assert only(found, "bf16").numbers["lost_update_frac"] == 0.5


def test_stochastic_rounding_goes_as_far_as_fp32_on_average() -> None:
    # An update of an eighth of a spacing: 1 in 8 elements moves by a whole one. The mean of 3 * 2048 draws is off by
    # at most 3 * sqrt(7 / 6144) = 10 % of itself.
    fault = only(faults([1.0] * 2048, 2.0**-11), "bf16")
    assert fault.numbers["kept_movement"] == 0
    assert fault.numbers["with_stochastic_rounding"] == pytest.approx(1, abs=0.1)
    assert "with_stochastic_rounding" not in only(faults([1.0], 2.0**-11), "fp16").numbers


def test_weight_decay_that_rounds_away_is_seen_alone() -> None:
    # It takes 0.125 * 2**-3 = 2**-6 off a weight: more than bf16's half spacing, of at most 2**-8, and less than that
    # of e4m3, of at least 2**-5 of the weight.
    found = faults([1.5, 1.25], 0.0, lr=0.125, weight_decay=2.0**-3)
    assert only(found, "bf16").numbers["lost_weight_decay_frac"] == 0
    assert only(found, "bf16").numbers["weight_decay"] == pytest.approx(2.0**-6)
    assert only(found, "fp8_e4m3").numbers["lost_weight_decay_frac"] == 1


def test_without_weight_decay_nothing_is_said_of_it() -> None:
    assert "weight_decay" not in only(faults([1.0], 1.0), "bf16").numbers


def test_nothing_is_known_where_no_step_was_taken() -> None:
    run = run_of([1.0], [[1.0]], lambda params: torch.optim.LBFGS(params))
    assert run.num_steps == 0
    assert list(parameter_faults(run, FORMATS)) == []
