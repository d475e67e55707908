from dataclasses import replace

from autoprec.analysis.loss_scale import LossScaleAdvice
from autoprec.analysis.loss_scale_findings import LossScaleFinding, loss_scale_findings, power
from autoprec.policy.policy import LossScale

ADVICE = LossScaleAdvice(
    format="fp16", needed=True, initial=1024.0, flush_frac=0.5, subnormal_frac=0.6, scaled_flush_frac=0.25,
    max_abs=0.1, lost=(("stem:conv2d#0", 0.9), ("mid:conv2d#0", 0.5)), minimum=256.0, maximum=8192.0,
)  # fmt: skip
QUIET = replace(ADVICE, needed=False, lost=())


def only(advice: LossScaleAdvice) -> LossScaleFinding:
    (found,) = loss_scale_findings(advice)
    return found


def test_what_is_quiet_stays_quiet() -> None:
    assert list(loss_scale_findings(QUIET)) == []
    assert list(loss_scale_findings(replace(QUIET, inner_max_abs=1.0))) == []


def test_an_interval_other_than_the_default_is_written_down_and_the_policy_takes_it() -> None:
    found = only(replace(ADVICE, growth_interval=250))
    assert found.fix == "loss_scale: {kind: dynamic, initial: 1024, growth_interval: 250}"
    assert LossScale(kind="dynamic", initial=1024, growth_interval=250).growth_interval == 250
    assert only(ADVICE).fix == "loss_scale: {kind: dynamic, initial: 1024}"


def test_gradients_that_no_one_scale_serves_are_named() -> None:
    found = only(replace(ADVICE, minimum=2.0**20))
    assert "some gradients need 2**20, and with more than 2**13 the largest overflows" in found.fix
    assert found.fix.endswith("keep stem:conv2d#0, mid:conv2d#0 in FP32")


def test_an_overflow_in_the_forward_pass_comes_first_and_promises_no_scale() -> None:
    found = list(loss_scale_findings(replace(ADVICE, forward_overflow=("a:linear#0", "b:linear#0"))))
    assert [each.code for each in found] == ["forward_overflow", "gradients_underflow"]
    assert (found[0].site, found[0].severity) == ("a:linear#0", "warning")
    assert "no loss scale helps" in found[0].message
    assert "so do 1 others" in found[0].message
    assert found[0].fix == 'keep it in FP32: {sites: "a:linear#0", format: fp32}'


def test_a_gradient_out_of_range_is_told() -> None:
    assert only(replace(QUIET, overflowing=("a:linear#0",))).site == "a:linear#0"
    assert only(replace(QUIET, overflowing=("a.weight",))).site == ""
    assert list(loss_scale_findings(replace(QUIET, overflowing=("a.weight",), per_tensor=True))) == []


def test_gradients_that_the_loss_takes_itself_are_out_of_reach() -> None:
    codes = [each.code for each in loss_scale_findings(replace(ADVICE, inner_max_abs=8e-5))]
    assert codes == ["gradients_underflow", "loss_scale_does_not_reach"]


def test_powers_of_two_are_written_as_such() -> None:
    assert [power(scale) for scale in (1.0, 2.0, 4096.0, 0.25)] == ["1", "2**1", "2**12", "2**-2"]
