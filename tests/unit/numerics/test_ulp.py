import math

import pytest

from autoprec.numerics import FORMATS, is_swamped, next_down, next_up, ulp, value_of_code

BF16 = FORMATS["bf16"]
FP16 = FORMATS["fp16"]
E4M3 = FORMATS["fp8_e4m3"]
E5M2 = FORMATS["fp8_e5m2"]


@pytest.mark.parametrize(
    ("x", "gap"),
    [
        (1.0, 2.0**-7),
        (-1.99, 2.0**-7),
        (2.0, 2.0**-6),
        (256.0, 2.0),
        (255.0, 1.0),
        (0.0, 2.0**-133),
        (1e-45, 2.0**-133),
        (2.0**128, 2.0**121),
        (math.inf, math.inf),
        (-math.inf, math.inf),
    ],
)
def test_ulp_of_bf16(x: float, gap: float) -> None:
    assert ulp(x, BF16) == gap


def test_ulp_of_nan_is_nan() -> None:
    assert math.isnan(ulp(math.nan, BF16))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "bf16", "fp16"])
def test_neighbors_are_the_next_codes(name: str) -> None:
    fmt = FORMATS[name]
    step = 1 if fmt.storage_bits == 8 else 97  # 97: all residues, few codes
    num_positive = 2 ** (fmt.significant_bits - 1) - fmt.num_nan_codes // 2
    for code in range(0, num_positive - 1, step):
        low, high = value_of_code(code, fmt), value_of_code(code + 1, fmt)
        assert next_up(low, fmt) == high
        assert next_down(high, fmt) == (low if high != math.inf else fmt.max)
        assert next_down(-low, fmt) == -high
        if high != math.inf:
            assert next_up((low + high) / 2, fmt) == high
            assert next_down((low + high) / 2, fmt) == low
            assert next_up(-(low + high) / 2, fmt) == -low


def test_neighbors_at_the_ends() -> None:
    assert next_up(FP16.max, FP16) == math.inf
    assert next_up(math.inf, FP16) == math.inf
    assert next_down(math.inf, FP16) == FP16.max
    assert next_up(-math.inf, E5M2) == -E5M2.max
    assert math.isnan(next_up(E4M3.max, E4M3))
    assert next_up(-0.0, E4M3) == E4M3.min_subnormal
    assert math.isnan(next_up(math.nan, FP16))


@pytest.mark.parametrize(
    ("addend", "total", "swamped"),
    [
        (1.0, 256.0, True),  # tie goes to the even 256
        (1.0, 258.0, False),  # tie goes to the even 260
        (1.0, 255.0, False),
        (0.999, 258.0, True),
        (1.001, 256.0, False),
        (-0.5, 256.0, True),  # below a power of two the gap halves: tie to even
        (-0.5001, 256.0, False),
        (0.0, 256.0, False),
        (1e-30, 0.0, False),
        (math.inf, 256.0, False),
        (1.0, math.inf, False),
        (math.nan, 1.0, False),
        (1.0, 1e39, False),  # the total itself overflows
        (1e-45, 1.0, True),
    ],
)
def test_is_swamped_in_bf16(addend: float, total: float, swamped: bool) -> None:
    assert is_swamped(addend, total, BF16) is swamped
    assert is_swamped(-addend, -total, BF16) is swamped
