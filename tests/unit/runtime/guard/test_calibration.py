import math

import pytest

from autoprec.errors import GuardError
from autoprec.policy import Policy, Rule, dump_policy, parse_policy
from autoprec.runtime.guard.calibration import Calibration, LossBand, calibration_of, loss_band, to_plain


def policy(evidence):
    return Policy(name="p", rules=(Rule(sites="*", format="fp32"),), evidence=evidence)


def test_a_band_follows_the_curve_and_knows_its_scatter():
    band = loss_band([10.0 - 0.1 * step + (0.2 if step % 2 else -0.2) for step in range(80)])
    assert len(band.steps) == 8
    assert band.at(40) == pytest.approx(6.0, abs=0.05)
    assert band.at(-5) == band.means[0]
    assert band.at(1000) == band.means[-1]
    assert band.fall == pytest.approx(7.0)
    assert 0.2 <= band.scatter < 0.3  # the scatter of single steps, and what the flat ends leave out of the slope


def test_a_rising_curve_has_no_fall():
    assert loss_band([float(step) for step in range(16)]).fall == 0.0


@pytest.mark.parametrize("losses", [[1.0] * 15, [1.0] * 20 + [math.nan], [1.0] * 20 + [math.inf]])
def test_too_short_or_broken_curves_have_no_band(losses):
    assert loss_band(losses) is None


def test_policy_and_file_keep_a_calibration_in_few_digits():
    whole = Calibration(
        losses=LossBand(steps=(5.0, 15.0), means=(3.14159265, 2.0), scatter=0.123456789),
        skipped_frac=1 / 3,
        loss_scale=65536.0,
        flush_frac=0.0,
        overflow_frac=1e-7,
    )
    read = calibration_of(policy({"calibration": to_plain(whole)}))
    assert read.losses == LossBand(steps=(5.0, 15.0), means=(3.142, 2.0), scatter=0.1235)
    assert (read.skipped_frac, read.flush_frac, read.overflow_frac) == (0.3333, 0.0, 1e-7)
    assert read.loss_scale == 65540.0  # four digits: a guard compares with powers of two of it
    assert read.layer_flush_frac is None
    text = dump_policy(policy({"calibration": to_plain(whole)}))
    assert calibration_of(parse_policy(text, "text")) == read
    assert dump_policy(parse_policy(text, "text")) == text
    assert len(text) < 500
    assert to_plain(read) == to_plain(whole)


def test_a_policy_without_one_has_none():
    assert calibration_of(policy({})) is None


@pytest.mark.parametrize(
    ("plain", "what"),
    [
        ("soon", "it is 'soon'"),
        ({}, "it is "),
        ({"schema": 2}, "it has schema 2, and this autoprec reads up to 1"),
        ({"schema": 1, "loss_scale": True}, "True is no finite number"),
        ({"schema": 1, "flush_frac": "half"}, "'half' is no finite number"),
        ({"schema": 1, "losses": {"steps": [1.0]}}, "KeyError: 'means'"),
        ({"schema": 1, "losses": {"steps": [2.0, 1.0], "means": [1.0, 1.0], "scatter": 1.0}}, "steps that rise"),
        ({"schema": 1, "losses": 3}, "TypeError"),
    ],
)
def test_an_unreadable_one_is_named_with_the_way_out(plain, what):
    with pytest.raises(GuardError, match=r'evidence.calibration of policy "p" cannot be read: ') as error:
        calibration_of(policy({"calibration": plain}))
    assert what in str(error.value)
    assert "tune again, or delete the key" in str(error.value)
