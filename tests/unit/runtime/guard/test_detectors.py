"""Each detector on numbers alone: below its threshold it is quiet, above it speaks, with number and threshold."""

import math
from dataclasses import replace

import pytest

from autoprec.errors import GuardError
from autoprec.runtime.guard.calibration import Calibration, LossBand
from autoprec.runtime.guard.detectors import DETECTORS, findings, resting
from autoprec.runtime.guard.limits import GuardLimits
from autoprec.runtime.guard.sample import Sample

KNOWN = Calibration(
    losses=LossBand(steps=(10.0, 50.0), means=(4.0, 2.0), scatter=0.5),
    skipped_frac=0.01,
    loss_scale=2.0**16,
    flush_frac=0.1,
    layer_flush_frac=0.4,
    overflow_frac=0.0,
)
QUIET = Sample(
    position=40, loss_mean=2.5, num_losses=25, lowest_loss=2.4, is_scaled=True, loss_scale=2.0**15, num_counted=200,
    flush_frac=0.15, layer_flush_frac=0.5, overflow_frac=0.0,
)  # fmt: skip
LOUD = {
    "ranks": ({"odd_rank": 1, "odd_what": "the weights"}, 1, 0),
    "non_finite_weights": ({"broken_parameter": "head.bias"}, math.nan, 0),
    "non_finite_loss": ({"num_bad_losses": 2}, 2, 0),
    "non_finite_gradient": ({"num_bad_steps": 2, "is_scaled": False}, 2, 0),
    "loss_scale_collapse": ({"skipped_in_row": 12}, 2.0**15, 0),
    # 5 % allowed, and twice the larger of what was calibrated and one step in a growth interval
    "skipped_steps": ({"skipped_frac": 0.08}, 0.08, 0.05 + 2 * 0.01),
    "flush": ({"flush_frac": 0.4}, 0.4, 0.1 + 0.25 * 0.9),
    "overflow": ({"overflow_frac": 0.01}, 0.01, 0.001),
    "frozen_weights": ({"frozen_frac": 0.95, "frozen_parameter": "norm.weight"}, 0.95, 0.9),
    # lowest so far 2.4, recorded 2.5 at step 40; 6 sigma of a mean of 25 steps, and a tenth of the recorded fall
    "loss_drift": ({"loss_mean": 3.5}, 3.5, 2.5 + 6 * 0.5 / 5 + 0.1 * 2.0),
    "non_finite_update": ({"undone_parameter": "head.bias", "num_undone": 3}, 3, 0),
    "checkpoint": ({"saved_scale": 2.0**10}, 2.0**15, 2.0**10),
}


def test_a_quiet_sample_has_no_findings():
    assert findings(QUIET, KNOWN, GuardLimits()) == ()


def test_every_detector_is_shown_a_fault():
    assert LOUD.keys() == DETECTORS.keys()


@pytest.mark.parametrize("name", LOUD)
def test_one_fault_is_found_by_one_detector_with_its_number(name):
    changes, number, threshold = LOUD[name]
    found = findings(replace(QUIET, **changes), KNOWN, GuardLimits())
    assert [each.detector for each in found] == [name]
    assert found[0].threshold == pytest.approx(threshold)
    assert found[0].number == number or math.isnan(number)
    assert found[0].message
    assert found[0].advice


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bad_steps": 2},  # under loss scaling that is how a scale is found
        {"skipped_in_row": 11},
        {"skipped_in_row": 11, "loss_scale": 2.0**7},
        {"skipped_frac": 0.08, "num_counted": 50},  # too few to say
        {"skipped_frac": 0.08, "growth_interval": 20},
        {"flush_frac": 0.3},
        {"overflow_frac": 0.01, "is_dynamic": True},
        {"frozen_frac": 0.8, "frozen_parameter": "norm.weight"},
        {"loss_mean": 3.2},
        {"loss_mean": 3.5, "lowest_loss": 3.4},  # above the record, but falling: a schedule that warms up
        {"loss_mean": 3.5, "position": 10},
        {"loss_mean": math.nan, "num_losses": 0},
        {"loss_mean": 3.5, "lowest_loss": math.inf},  # the first sample has nothing to rise from
        {"saved_scale": 2.0**15},
    ],
)
def test_what_is_not_wrong_is_not_reported(changes):
    assert findings(replace(QUIET, **changes), KNOWN, GuardLimits()) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"skipped_in_row": 3, "loss_scale": 2.0**6},  # a thousandth of where it settled
        {"skipped_in_row": 3, "loss_scale": 1.0, "minimum_scale": 1.0},
    ],
)
def test_a_collapse_shows_in_the_scale_too(changes):
    assert [each.detector for each in findings(replace(QUIET, **changes), KNOWN, GuardLimits())] == [
        "loss_scale_collapse"
    ]


def test_one_layer_that_flushes_is_enough():
    found = findings(replace(QUIET, layer_flush_frac=0.8, flush_layer="head"), KNOWN, GuardLimits())
    assert [(each.detector, each.site, each.number) for each in found] == [("flush", "head", 0.8)]


def test_the_gravest_comes_first():
    sample = replace(QUIET, odd_rank=1, broken_parameter="w", num_bad_losses=1, flush_frac=0.9)
    found = [each.detector for each in findings(sample, KNOWN, GuardLimits())]
    assert found == ["ranks", "non_finite_weights", "non_finite_loss", "flush"]


def test_detectors_rest_without_what_they_compare_with():
    loud = replace(QUIET, flush_frac=0.9, overflow_frac=0.9, loss_mean=99.0)
    assert findings(loud, Calibration(), GuardLimits()) == ()
    assert dict(resting(None)) == {
        "flush": "flush_frac, layer_flush_frac", "overflow": "overflow_frac", "loss_drift": "losses"
    }  # fmt: skip
    assert resting(KNOWN) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patience": 0}, "limits.patience is 0; allowed: whole numbers from 1"),
        ({"window": 2.5}, "limits.window is 2.5; allowed: whole numbers from 1"),
        ({"flush_frac": 0.0}, "limits.flush_frac is 0.0; allowed: fractions above 0 up to 1"),
        ({"band": math.inf}, "limits.band is inf; allowed: numbers above 0"),
    ],
)
def test_limits_that_say_nothing_are_refused(changes, message):
    with pytest.raises(GuardError, match=message):
        GuardLimits(**changes)


@pytest.mark.parametrize("row", DETECTORS.values(), ids=lambda row: row.name)
def test_rows_keep_the_order_of_reactions(row):
    order = ["warn", "promote", "fallback", "restore", "stop"]
    assert list(row.reactions) == [each for each in order if each in row.reactions]
    assert set(row.needs) <= set(Calibration.__dataclass_fields__)
