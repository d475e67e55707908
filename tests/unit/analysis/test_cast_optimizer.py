import pytest
import torch

from autoprec.analysis.cast_optimizer import cast_optimizers
from tests.unit.analysis.stored_runs import adam, run_of, sgd


def test_a_weight_without_gradient_becomes_zero_by_zero_in_fp16() -> None:
    fp16, bf16 = cast_optimizers(run_of([0.5] * 4, [[1.0, 1.0, 1.0, 0.0]], adam(lr=1e-3)), ("fp16", "bf16"))
    assert (fp16.eps_vanishes, fp16.nonfinite_frac) == (True, {"weight": 0.25})
    assert (bf16.eps_vanishes, bf16.nonfinite_frac, bf16.larger_eps) == (False, {}, None)


def test_the_eps_that_helps_is_tried_and_not_guessed() -> None:
    (cast,) = cast_optimizers(run_of([0.5] * 2, [[1.0, 0.0]], adam(lr=1e-3)), ("fp16",))
    assert cast.larger_eps == 1e-6  # any that fp16 holds: 0 / eps is 0
    # With a gradient of 1e-3, v = 1e-3 * 1e-6 flushes to 0: the step is lr * 1e-3 / eps, 10 times lr for 1e-4.
    (cast,) = cast_optimizers(run_of([0.5] * 2, [[1e-3, 0.0]], adam(lr=1e-3)), ("fp16",))
    assert cast.larger_eps == pytest.approx(1e-4)


def test_a_larger_eps_of_the_users_is_fine() -> None:
    (cast,) = cast_optimizers(run_of([0.5] * 2, [[1.0, 0.0]], adam(lr=1e-3, eps=1e-4)), ("fp16",))
    assert (cast.eps_vanishes, cast.nonfinite_frac) == (False, {})


def test_an_optimizer_without_eps_has_none() -> None:
    (cast,) = cast_optimizers(run_of([0.5], [[1.0]], sgd(0.1)), ("fp16",))
    assert (cast.eps, cast.eps_vanishes, cast.step_growth) == (None, False, pytest.approx(1, abs=0.01))


def test_nothing_computes_in_eight_bits_and_nothing_is_said_of_them() -> None:
    assert cast_optimizers(run_of([0.5], [[1.0]], sgd(0.1)), ("fp8_e4m3", "fp8_e5m2")) == ()


def test_nothing_is_known_without_steps() -> None:
    assert cast_optimizers(run_of([0.5], [[1.0]], lambda params: torch.optim.LBFGS(params)), ("fp16",)) == ()
