"""Errors of sites: measured where steps allow, scaled from first-order effects elsewhere."""

import math

import pytest
import scipy.stats
import torch

from autoprec.analysis.low_format import low_format
from autoprec.analysis.low_step import damage, reference_of
from autoprec.analysis.repair import units_of
from autoprec.analysis.sensitivity import sensitivities
from autoprec.analysis.site_errors import _ranks, site_errors
from autoprec.capture import record
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS
from tests.unit.analysis.recorded import workload

BF16 = low_format("bf16", "cpu", ("fp32",))


def chain_of_three(net, x):
    return ((x * net.one).tanh() * net.two).square().mean()


def recorded(loss=chain_of_three, size=64):
    values = torch.linspace(0.1, 1.0, size)
    return record(workload(loss, values, one=values.flip(0).clone(), two=torch.full((size,), 1.3)))


def test_an_error_is_the_square_of_the_gradient_error_alone():
    reference = reference_of(recorded())
    sites = reference.recording.op_graph.sites()
    found = site_errors(reference, BF16, sites)
    units = units_of([reference.recording.op_graph], sites)
    assert (found.num_units, found.num_measured) == (len(units), len(units))
    assert len(units) == len(sites) - 1  # the two products of one line are one unit
    for unit in units:
        alone = damage(reference, BF16, set(unit), forced=set(unit))
        assert sum(found.errors[site] for site in unit) == pytest.approx(alone.gradient_error**2)


def test_what_is_not_measured_is_scaled_from_what_is():
    reference = reference_of(recorded())
    sites = reference.recording.op_graph.sites()
    effects = sensitivities(reference, BF16, sites)
    found = site_errors(reference, BF16, sites, max_steps=1)
    units = units_of([reference.recording.op_graph], sites)
    estimate = {unit: sum(effects[site].error for site in unit) for unit in units}
    first = max(units, key=estimate.__getitem__)
    ratio = sum(found.errors[site] for site in first) / estimate[first]
    assert found.num_measured == 1
    assert math.isnan(found.rank_correlation)
    for unit in units:
        assert sum(found.errors[site] for site in unit) == pytest.approx(estimate[unit] * ratio)


def test_a_site_that_overflows_has_an_infinite_error():
    reference = reference_of(recorded(lambda net, x: (x * net.one * 1e6).square().mean().sqrt() + net.two.sum()))
    fp16 = low_format("fp16", "cpu", ("fp32",))
    found = site_errors(reference, fp16, reference.recording.op_graph.sites())
    assert found.errors[Site("", "square", 0)] == math.inf


def test_a_first_order_effect_is_the_sum_of_squared_gradient_times_rounding_error():
    reference = reference_of(recorded(lambda net, x: (x * net.one + 0 * net.two).sum()))
    (found,) = (
        each
        for site, each in sensitivities(reference, BF16, reference.recording.op_graph.sites()).items()
        if site == Site("", "mul", 0)
    )
    x, one = torch.linspace(0.1, 1.0, 64), torch.linspace(0.1, 1.0, 64).flip(0)
    rounding = (x.bfloat16() * one.bfloat16()).float() - x * one  # the gradient is 1 everywhere
    assert found.error == pytest.approx(float(rounding.double().square().sum()), rel=0.02)  # it is kept in bf16
    assert found.relative_error == pytest.approx(float(rounding.norm() / (x * one).norm()), rel=1e-5)
    assert found.relative_error < 2 * FORMATS["bf16"].unit_roundoff


def test_a_result_that_is_written_over_is_watched_as_it_was():
    def loss(net, x):
        hidden = x * net.one
        return (torch.relu_(hidden) * net.two).sum()

    reference = reference_of(recorded(loss))
    sites = reference.recording.op_graph.sites()
    found = sensitivities(reference, BF16, sites)
    x = torch.linspace(0.1, 1.0, 64)
    rounding = (x.bfloat16() * x.flip(0).bfloat16()).float() - x * x.flip(0)
    expected = float((1.3 * rounding.double()).square().sum())
    assert found[Site("", "mul", 0)].error == pytest.approx(expected, rel=0.02)
    assert site_errors(reference, BF16, sites).num_measured > 0


def test_ranks_are_those_that_spearman_takes() -> None:
    for values in ([3.0, 1.0, 2.0], [1.0, 1.0, 0.0, 5.0, 1.0, 5.0], [0.0, -0.0, 1.0], []):
        assert _ranks(values) == list(scipy.stats.rankdata(values) - 1)
