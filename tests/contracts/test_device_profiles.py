"""What every row of the device profiles owes."""

import math
import re

import pytest

from autoprec.errors import DeviceError
from autoprec.measure.device_profiles import PROFILES, profile_named
from autoprec.numerics import FORMATS
from autoprec.policy import preset
from autoprec.runtime.device import DeviceInfo
from autoprec.search.space import load_space, space_name, space_path

ROWS = pytest.mark.parametrize("row", PROFILES.values(), ids=lambda row: row.name)


@ROWS
def test_every_figure_is_positive_and_has_a_source_and_a_date(row):
    for name, figure in row.figures().items():
        assert 0 < figure.value < math.inf, name
        assert len(figure.source) > 20, name
        assert figure.source.endswith(("(from memory)", "(checked)")) or re.match("assumed|derived", figure.source)
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", figure.date), name


@ROWS
def test_coarser_formats_are_not_slower(row):
    order = ("fp32", "tf32", "bf16", "fp8_e4m3")
    rates = [row.peaks[name].value for name in order if name in row.peaks]
    assert rates == sorted(rates)
    assert row.peaks.get("fp16", row.peaks.get("bf16")) == row.peaks.get("bf16")


@ROWS
def test_figures_are_of_the_order_that_units_promise(row):
    assert 1e12 < row.peaks["fp32"].value < 1e14
    assert all(each.value < 1e16 for each in row.peaks.values())
    assert 1e11 < row.bandwidth.value < 1e13
    assert 1e-7 < row.launch.value < 1e-4
    # a device computes more than one operation, and fewer than a thousand, in the time it takes to load a byte
    assert all(1 < each.value / row.bandwidth.value < 1000 for each in row.peaks.values())


@ROWS
def test_formats_are_known_and_what_they_imply(row):
    assert set(row.peaks) <= set(FORMATS)
    assert row.has_float8 == ("fp8_e5m2" in row.formats)
    assert set(row.inside) == {"ieee"} | ({"tf32"} if row.has_tf32 else set()) | (
        {"bf16"} if row.kind == "cpu" and row.low_formats else set()
    )
    assert preset("fp32", row.lists).name == "fp32"


@ROWS
def test_the_search_space_is_its_own_and_offers_no_format_that_the_device_lacks(row):
    path = space_path(row.space)
    assert path.stem == row.space
    space = load_space(path)
    if row.low_formats:
        assert set(space.low) <= set(row.low_formats)
        assert set(space.float32_matmul) <= set(row.inside)


@ROWS
def test_a_device_that_is_at_hand_gets_the_space_of_its_profile(row):
    if row.kind == "xla":
        pytest.skip("autoprec runs on no TPU")
    capability = {"a100": "8.0", "h100": "9.0", "h200": "9.0", "b200": "10.0", "rtx-4090": "8.9"}.get(row.name)
    device = DeviceInfo(
        kind=row.kind,
        name=row.title,
        capability={} if capability is None else {"compute_capability": capability},
        formats=row.formats,
        native_formats=row.formats,
        num_threads=1,
        torch_version="2.13.0",
    )
    assert space_name(device) == row.space


def test_newer_data_center_gpus_are_not_slower():
    names = ("a100", "h100", "h200", "b200")
    for format_name in ("fp32", "tf32", "bf16"):
        rates = [PROFILES[name].peaks[format_name].value for name in names]
        assert rates == sorted(rates)
    assert [PROFILES[name].bandwidth.value for name in names] == sorted(
        PROFILES[name].bandwidth.value for name in names
    )


def test_the_families_that_people_have_are_there():
    assert set(PROFILES) >= {"cpu-amx", "cpu-avx512", "cpu-avx2", "rtx-4090", "a100", "h100", "h200", "b200", "tpu-v5e"}
    assert not PROFILES["a100"].has_float8
    assert PROFILES["tpu-v5e"].low_formats == ("bf16",)
    assert PROFILES["cpu-avx2"].low_formats == ()


def test_an_unknown_profile_is_told_with_those_there_are():
    with pytest.raises(DeviceError, match=r'no device profile is called "a-100"; profiles: cpu-amx.*nearest: "a100"'):
        profile_named("a-100")
    assert profile_named("h100") is PROFILES["h100"]
