import pytest

from autoprec.analysis import ExponentHistogram
from autoprec.numerics import FORMATS
from autoprec.report.exponent_axis import NUM_ROWS, axis_of, heights

FP16, BF16, E4M3 = FORMATS["fp16"], FORMATS["bf16"], FORMATS["fp8_e4m3"]


def histogram(*counts: tuple[int, int]) -> ExponentHistogram:
    return ExponentHistogram(counts=counts)


def test_zones_begin_where_the_format_says():
    """fp16 flushes below 2**-25, is subnormal below 2**-14 and overflows from 2**16 on."""
    axis = axis_of([histogram((-30, 1), (17, 1))], [FP16, BF16], 100)
    zones = dict(axis.zones)
    exponents = {zone: [axis.binades(i)[0] for i, each in enumerate(zones["fp16"]) if each == zone] for zone in
                 ("flush", "subnormal", "normal", "overflow")}  # fmt: skip
    assert axis.step == 1
    assert (max(exponents["flush"]), min(exponents["subnormal"])) == (-26, -25)
    assert (max(exponents["subnormal"]), min(exponents["normal"])) == (-15, -14)
    assert (max(exponents["normal"]), min(exponents["overflow"])) == (15, 16)
    assert set(zones["bf16"]) == {"normal"}


@pytest.mark.parametrize("width", [2, 7, 20, 68, 108, 500])
def test_every_element_has_its_column_at_every_width(width):
    histograms = [histogram((-149, 2), (0, 5), (1, 1)), histogram((-1, 3), (127, 1))]
    axis = axis_of(histograms, [FP16, E4M3], width)
    assert axis.num_columns <= width
    assert all(len(zones) == axis.num_columns for _, zones in axis.zones)
    for each in histograms:
        columns = axis.columns(each)
        assert sum(columns) == each.num_nonzero
        for exponent, count in each.counts:
            (column,) = [i for i in range(axis.num_columns) if axis.binades(i)[0] <= exponent <= axis.binades(i)[1]]
            assert columns[column] >= count


def test_a_column_of_several_binades_tells_of_the_harm():
    axis = axis_of([histogram((-60, 1), (60, 1))], [FP16], 50)
    (_, zones), = axis.zones  # fmt: skip
    assert axis.step == 3
    for column, zone in enumerate(zones):
        low, high = axis.binades(column)
        assert (zone == "flush") == (low < -25)
        assert (zone == "overflow") == (high >= 16)


def test_near_bounds_are_shown_and_far_ones_are_not():
    axis = axis_of([histogram((0, 1))], [FP16], 100)
    assert axis.binades(0)[0] == -16  # the bound at -14, and a margin; that at -25 is farther than 16
    assert axis.binades(axis.num_columns - 1)[1] == 18


def test_ticks_stand_at_multiples_of_ten_columns():
    axis = axis_of([histogram((-22, 1), (12, 1))], [FP16], 100)
    assert [(axis.binades(column)[0], label) for column, label in axis.ticks] == [
        (-20, "2^-20"), (-10, "2^-10"), (0, "2^0"), (10, "2^10"),
    ]  # fmt: skip


def test_nothing_has_no_axis():
    assert axis_of([histogram()], [FP16], 80) is None


def test_a_terminal_of_no_width_gets_two_columns():
    assert axis_of([histogram((-9, 1), (9, 1))], [FP16], 0).num_columns == 2


def test_bars_are_in_proportion_and_one_element_shows():
    found = histogram((0, 1_000_000), (1, 500_000), (2, 1))
    axis = axis_of([found], [], 80)
    assert [height for height in heights(found, axis) if height] == [8 * NUM_ROWS, 4 * NUM_ROWS, 1]
