"""How far numbers are from the ends of a format: what is counted where, and masks that are not."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from autoprec.analysis import tensor_numerics
from autoprec.audit.runs import Legs
from autoprec.audit.site_reach import SiteReach, _computed, reach_of
from autoprec.numerics import format_named
from tests.faults import planted_models as models
from tests.faults.audit_faults_b import Planted, audited, policy

LEGS = Legs(before=1, after=8)


def reaches(low: tuple[str, str], folder: Path, scale: float = 1.0, **fields: object) -> list[SiteReach]:
    given = audited(Planted(workload=models.workload(**fields), policy=policy(low)), folder)  # type: ignore[arg-type]
    recordings = given.runs.recordings(None, 1, LEGS)
    return list(reach_of(recordings, given, given.runs.ran_as(), scale))


def test_a_site_counts_with_what_it_reads_returns_and_hands_back(tmp_path: Path) -> None:
    found = reaches(("head:linear", "fp16"), tmp_path)
    assert {(each.where, each.what) for each in found} == {
        ("head:linear#0", "input"),
        ("head:linear#0", "output"),
        ("head:linear#0", "gradient"),
        ("head:linear#0", "gradient for :mean#0, computed here"),
        ("head.weight", "parameter, read at head:linear#0"),
        ("head.bias", "parameter, read at head:linear#0"),
        ("head.weight", "gradient, computed at head:linear#0"),
        ("head.bias", "gradient, computed at head:linear#0"),
    }
    assert [each.headroom for each in found] == sorted(each.headroom for each in found)


def test_only_gradients_are_scaled(tmp_path: Path) -> None:
    plain = {(each.where, each.what): each for each in reaches(("head:linear", "fp16"), tmp_path)}
    for each in reaches(("head:linear", "fp16"), tmp_path, scale=1024.0):
        apart = plain[each.where, each.what].headroom - each.headroom
        assert apart == pytest.approx(10.0 if each.kind == "gradient" else 0.0)
        assert each.largest == pytest.approx(plain[each.where, each.what].largest * 1024 ** (each.kind == "gradient"))


def test_headroom_is_the_distance_to_the_largest_number(tmp_path: Path) -> None:
    found = reaches(("head:linear", "fp16"), tmp_path, model=partial(models.Loud, 1e6))
    least = found[0]
    assert (least.where, least.kind) == ("head:linear#0", "activation")
    assert least.headroom == pytest.approx(math.log2(65504 / least.largest))
    assert least.headroom < 0


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([0.0, -1e9, 0.0], 0.0),  # a mask by itself
        ([1.0, -3.0, torch.finfo(torch.float32).min], 4.0),  # and added to scores: up to the next power of two
        ([1.0, -3.0, -1e4], 1e4),  # fits
        ([1.0, -3.0, 1e9], 1e9),  # no mask is positive
        ([-1e9, -1e9], 1e9),  # nothing is left in view
        ([1e4, -1e5], 1e5),  # one level among others
    ],
)
def test_a_mask_is_no_activation(values: list[float], largest: float) -> None:
    found = _computed(tensor_numerics(torch.tensor(values), ()), format_named("fp16"))
    assert found.max_abs == pytest.approx(largest)
