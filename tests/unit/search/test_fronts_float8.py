"""Fronts in which FP8 is a way of being low."""

import math

import pytest

from autoprec.analysis.site_errors import SiteErrors
from autoprec.search.fronts import front_of

from .test_cost_model import EXP, LINEAR, LOSS, TANH, both, model, op_time

FP8_LINEAR = {"linear": {**both(10.0, 4.0), "fp8_e4m3": op_time(1.0, "bfloat16")}}


def errors(fmt: str, **by_op: float) -> SiteErrors:
    sites = {site: by_op[site.op] for site in (LINEAR, TANH, EXP, LOSS) if site.op in by_op}
    return SiteErrors(format=fmt, errors=sites, num_units=4, num_measured=4, rank_correlation=math.nan)


BF16 = errors("bf16", linear=1e-4, tanh=1e-4, exp=1e-4, mean=1e-4)


def test_the_fastest_plan_multiplies_in_fp8_and_a_more_faithful_one_does_not():
    found = front_of(model(FP8_LINEAR), "bf16", BF16, (), errors("fp8_e4m3", linear=1e-2))
    assert found.plans[0].float8_sites == {LINEAR}
    assert LINEAR in found.plans[0].low_sites
    assert found.plans[0].error == pytest.approx(math.sqrt(1e-2 + 1e-4 * (len(found.plans[0].low_sites) - 1)))
    assert any(LINEAR in plan.low_sites and not plan.float8_sites for plan in found.plans)


def test_without_errors_in_fp8_and_at_a_site_that_is_kept_nothing_is_in_fp8():
    assert not any(plan.float8_sites for plan in front_of(model(FP8_LINEAR), "bf16", BF16, ()).plans)
    kept = front_of(model(FP8_LINEAR), "bf16", BF16, (LINEAR,), errors("fp8_e4m3", linear=1e-9))
    assert not any(LINEAR in plan.low_sites for plan in kept.plans)
