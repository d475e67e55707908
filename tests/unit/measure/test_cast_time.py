import pytest
import torch

from autoprec.measure.cast_time import SIZES, CastTime, CastTimes, key, measure_casts, sizes_up_to
from autoprec.measure.paired import Limits


def casts(*points):
    found = tuple(CastTime(numel=n, forward_s=f, backward_s=b) for n, f, b in points)
    return CastTimes(points={key("bf16", "down", "dense"): found})


LINE = casts((100, 1.0, 10.0), (200, 3.0, 30.0))


@pytest.mark.parametrize(
    ("numel", "seconds"),
    [(0, 0.0), (1, 11.0), (100, 11.0), (150, 22.0), (200, 33.0), (400, 66.0)],
)
def test_times_are_linear_between_sizes_and_go_with_the_size_beyond(numel, seconds):
    assert LINE.seconds("bf16", "down", numel) == pytest.approx(seconds)


def test_a_tensor_without_gradient_costs_the_forward_cast_alone():
    assert LINE.seconds("bf16", "down", 150, grad=False) == pytest.approx(2.0)


def test_directions_and_layouts_are_told_apart():
    with pytest.raises(KeyError):
        LINE.seconds("bf16", "up", 150)
    with pytest.raises(KeyError):
        LINE.seconds("bf16", "down", 150, layout="strided")


def test_sizes_surround_the_largest_tensor_as_far_as_they_go():
    assert sizes_up_to(1) == SIZES[:1]
    assert sizes_up_to(SIZES[2]) == SIZES[:3]
    assert sizes_up_to(SIZES[2] + 1) == SIZES[:4]
    assert sizes_up_to(10**12) == SIZES


def test_both_directions_and_layouts_of_every_format_are_measured():
    seen = []

    def clock(call):
        seen.append(call)
        return call(), 1e-3 * len(call.__self__._calls)

    found = measure_casts(
        ("bf16", "fp16"),
        (2**6, 2**10),
        device="cpu",
        clock=clock,
        limits=Limits(max_rounds=1, min_rounds=1),
        allowance_s=0.0,
    )
    ways = [key(f, d, o) for o in ("dense", "strided") for f in ("bf16", "fp16") for d in ("down", "up")]
    assert sorted(found) == sorted(ways)
    for points in found.values():
        assert [point.numel for point in points] == [2**6, 2**10]
        assert [point.forward_s + point.backward_s for point in points] == pytest.approx([2e-3, 2e-3])
    dtypes = {(b.__self__._calls[0][0][0][0].dtype, b.__self__._results[0].dtype) for b in seen}
    low = {torch.bfloat16, torch.float16}
    assert dtypes == {(torch.float32, each) for each in low} | {(each, torch.float32) for each in low}
