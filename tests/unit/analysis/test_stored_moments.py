import math

import pytest
import torch

from autoprec.analysis.stored_moments import moments
from autoprec.analysis.stored_values import StoredFault
from tests.unit.analysis.stored_runs import adam, run_of, sgd

FORMATS = ("fp16", "bf16", "fp8_e5m2")


def fault(key: str, format_name: str, make: object, gradients: list[list[float]]) -> StoredFault:
    found = moments(run_of([0.5] * len(gradients[0]), gradients, make), FORMATS).faults
    (one,) = [each for each in found if (each.part, each.format) == (key, format_name)]
    return one


SPREAD = [[float(2 ** (index / 64)) for index in range(64)]]  # one binade, evenly in the logarithm


@pytest.mark.parametrize(
    ("beta2", "bf16", "fp16"), [(0.99, False, False), (0.996, False, False), (0.999, True, False), (0.9999, True, True)]
)
def test_a_second_moment_freezes_where_its_decay_is_below_half_a_spacing(beta2: float, bf16: bool, fp16: bool) -> None:
    """Half a spacing at v is 2**-9 to 2**-8 of it in bf16 and 2**-12 to 2**-11 in fp16; v (1 - beta2) is compared."""
    for name, frozen in (("bf16", bf16), ("fp16", fp16)):
        found = fault("exp_avg_sq", name, adam(betas=(0.9, beta2), lr=1e-3), SPREAD)
        assert (found.numbers["frozen_frac"] == 1) == frozen
        # 1 - beta2**100 is 1 % for 0.9999: too little to call a fault yet, however frozen it is
        assert (found.verdict == "needs_fp32") == (frozen and beta2 < 0.9999), name


def test_what_is_left_after_quiet_steps_is_beta2_to_their_number() -> None:
    found = fault("exp_avg_sq", "bf16", adam(betas=(0.9, 0.999)), SPREAD)
    assert found.numbers["left_in_fp32"] == pytest.approx(0.999**100, rel=1e-4)
    assert found.numbers["left_in_low"] == 1
    assert "100% is left, and in FP32 90%" in found.reason


def test_a_first_moment_decays_in_bf16() -> None:
    found = fault("exp_avg", "bf16", adam(betas=(0.9, 0.999)), SPREAD)
    assert (found.verdict, found.numbers["frozen_frac"]) == ("fine", 0)
    # three roundings of at most 2**-8 each, of a moment that the step is proportional to
    assert found.numbers["step_error"] < 3 * 2.0**-8


def test_a_momentum_buffer_is_fine_in_bf16() -> None:
    assert fault("momentum_buffer", "bf16", sgd(0.1, momentum=0.9), SPREAD).verdict == "fine"


def test_a_second_moment_below_the_smallest_number_is_forgotten() -> None:
    # (1 - beta2) g**2 = 1e-3 * 1e-8 = 1e-11, fp16's smallest is 6e-8: each step knows its own gradient only, so that
    # v is too small by the number of steps and the step too large by its root: (1 + sqrt 2 + sqrt 3) / 3 in all.
    found = fault("exp_avg_sq", "fp16", adam(lr=1e-3), [[1e-4]])
    assert (found.verdict, found.numbers["flushed_frac"]) == ("needs_fp32", 1)
    assert found.numbers["step_error"] == pytest.approx((1 + 2**0.5 + 3**0.5) / 3 - 1, rel=0.01)
    assert "100% of it becomes 0" in found.reason


def test_where_it_is_forgotten_and_no_gradient_follows_the_step_is_divided_by_eps() -> None:
    found = fault("exp_avg_sq", "fp16", adam(lr=1e-3), [[1e-4], [0.0], [0.0]])
    # the second step is m_hat / eps = 0.09 / 0.19 * 1e-4 / 1e-8 in place of about 0.7
    assert found.numbers["step_error"] > 1000


def test_an_accumulator_that_the_optimizer_made_beforehand_is_followed() -> None:
    found = fault("sum", "bf16", lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1), SPREAD)
    assert found.verdict == "fine"
    assert found.numbers["step_error"] < 0.01


def test_an_optimizer_that_is_not_elementwise_is_not_followed() -> None:
    class ByNorm(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.data.sub_(each.grad / each.grad.norm() * 0.1)

    many = [[1.0] * 5000]  # more than are sampled
    run = run_of([0.5] * 5000, many, lambda params: ByNorm(params, lr=0.1))
    assert moments(run, FORMATS).not_followed == ("weight",)
    assert moments(run, FORMATS).faults == ()


def test_an_optimizer_that_asks_for_a_shape_is_not_followed() -> None:
    class ForMatrices(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    if each.dim() != 2:
                        raise ValueError("a matrix is needed")
                    super().step()

    run = run_of([[0.5, 0.5]], [[[1.0, 2.0]]], lambda params: ForMatrices(params, lr=0.1))
    assert run.num_steps == 3
    assert moments(run, FORMATS).not_followed == ("weight",)


def test_fp8_moments_are_stored_with_their_own_scale() -> None:
    # all elements alike: the scale puts them where e5m2 has numbers, off by at most 2**-3 each time
    found = fault("exp_avg_sq", "fp8_e5m2", adam(lr=1e-3), [[1e-6] * 4])
    assert found.numbers["flushed_frac"] == 0
    assert math.isfinite(found.numbers["step_error"])
