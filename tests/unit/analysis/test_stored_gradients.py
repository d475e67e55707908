import pytest

from autoprec.analysis.stored_gradients import gradient_faults
from tests.unit.analysis.stored_runs import only, run_of, sgd

FORMATS = ("fp16", "bf16", "fp8_e4m3")


def faults(*gradients: list[float]) -> list:
    return list(gradient_faults(run_of([0.0] * len(gradients[0]), gradients, sgd()), FORMATS))


def test_micro_batches_of_one_size_add_up() -> None:
    # 1.1 + 1.3 + 1.7 with two roundings of bf16, of at most 2**-8 each, relative to the rest, which is 3
    fault = only(faults([1.1, 1.1], [1.3, 1.3], [1.7, 1.7]), "bf16")
    assert (fault.verdict, fault.numbers["swamped_frac"]) == ("fine", 0)
    assert fault.numbers["error_of_later_ones"] <= 2 * 2.0**-8 * 4.1 / 3


def test_what_is_below_half_a_spacing_of_the_first_is_lost() -> None:
    # Half a spacing at 1 is 2**-8 in bf16, where a tie goes to even, to 1, and 2**-11 in fp16.
    found = faults([1.0], [2.0**-8], [2.0**-8])
    assert only(found, "bf16").numbers["swamped_frac"] == 1
    assert only(found, "bf16").numbers["error_of_later_ones"] == 1
    assert only(found, "bf16").numbers["error"] == pytest.approx(2.0**-7, rel=0.01)
    assert only(found, "bf16").verdict == "needs_fp32"
    assert only(found, "fp16").verdict == "fine"
    assert only(found, "fp8_e4m3").verdict == "needs_fp32"


def test_small_gradients_are_summed_under_a_loss_scale() -> None:
    fault = only(faults([1e-9], [1e-9], [1e-9]), "fp16")
    assert fault.verdict == "fine"
    assert fault.numbers["error"] < 2.0**-10


def test_gradients_that_cancel_are_not_called_lost() -> None:
    # The later ones sum to nothing: their relative error is large, and not one of them is swamped.
    fault = only(faults([1.0], [1.01], [-1.0]), "bf16")
    assert (fault.verdict, fault.numbers["swamped_frac"]) == ("fine", 0)


def test_zeros_are_not_counted() -> None:
    assert only(faults([1.0, 0.0], [0.0, 0.0], [0.0, 0.0]), "bf16").numbers["swamped_frac"] == 0
