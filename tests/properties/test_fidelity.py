"""What must hold for every pair of loss curves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.measure.fidelity import compare, hopeless

horizons = st.integers(8, 120)
seeds = st.integers(0, 2**32 - 1)
excesses = st.floats(-0.5, 0.5)


def curves(horizon, seed, excess, noise=0.01):
    rng = np.random.default_rng(seed)
    reference = 4 - 0.4 * np.log(np.arange(1, horizon + 1)) + rng.normal(0, 0.1, horizon)
    return reference, reference + excess + rng.normal(0, noise, horizon)


@given(horizons, seeds, excesses)
def test_the_estimate_lies_between_its_bounds(horizon, seed, excess):
    found = compare(*curves(horizon, seed, excess))
    assert found.lower_frac <= found.steps_lost_frac <= found.upper_frac


@given(horizons, seeds, excesses, st.floats(0.1, 10))
def test_units_of_the_loss_do_not_matter(horizon, seed, excess, unit):
    reference, candidate = curves(horizon, seed, excess)
    plain, scaled = compare(reference, candidate), compare(reference * unit, candidate * unit)
    assert plain.verdict == scaled.verdict
    assert scaled.steps_lost == pytest.approx(plain.steps_lost, rel=1e-6, abs=1e-9)


@given(horizons, seeds, excesses, st.floats(0.001, 0.5))
def test_a_worse_candidate_is_never_judged_better(horizon, seed, excess, worse):
    rank = {"faithful": 0, "inconclusive": 1, "unfaithful": 2}
    reference, candidate = curves(horizon, seed, excess)
    assert rank[compare(reference, candidate).verdict] <= rank[compare(reference, candidate + worse).verdict]


@given(horizons, seeds, excesses, st.floats(0.001, 0.2), st.floats(0.001, 0.2))
def test_a_wider_margin_never_refuses_more(horizon, seed, excess, one, other):
    rank = {"faithful": 0, "inconclusive": 1, "unfaithful": 2}
    reference, candidate = curves(horizon, seed, excess)
    narrow, wide = (compare(reference, candidate, margin=margin) for margin in sorted((one, other)))
    assert rank[wide.verdict] <= rank[narrow.verdict]


@given(horizons, seeds, excesses)
def test_what_is_hopeless_is_not_faithful(horizon, seed, excess):
    reference, candidate = curves(horizon, seed, excess)
    if hopeless(reference, candidate):
        assert compare(reference, candidate).verdict != "faithful"


@given(horizons, seeds, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_any_loss_that_is_not_finite_fails(horizon, seed, bad, data):
    reference, candidate = curves(horizon, seed, 0.0)
    at = data.draw(st.integers(0, horizon - 1))
    candidate[at] = bad
    found = compare(reference, candidate)
    assert found.verdict == "unfaithful"
    assert f"step {at + 1}" in found.reason
    assert hopeless(reference, candidate)


@given(st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=60))
def test_a_curve_is_faithful_to_itself(losses):
    found = compare(losses, losses)
    assert found.verdict == "faithful"
    assert found.steps_lost == 0


@given(st.integers(16, 120), seeds, st.floats(0.005, 0.5), st.floats(0.0, 3.0))
def test_a_lead_that_shrinks_to_nothing_is_never_refused(horizon, seed, lead, power):
    # Without noise of its own the difference is a line with a sure slope: only the rule on leads can tell.
    reference, _ = curves(horizon, seed, 0.0)
    steps = np.arange(1, horizon + 1)
    assert compare(reference, reference - lead * (steps / horizon) ** -power).verdict == "faithful"
