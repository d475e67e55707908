"""The tensor rounding equals the scalar oracle, and both equal the casts of torch and ml_dtypes."""

import itertools
import math
import random
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch

from autoprec.numerics import FORMATS, Format, RoundingMode, next_down, next_up, round_scalar, value_of_code
from autoprec.runtime import rounding
from autoprec.runtime.dtypes import DTYPES
from autoprec.runtime.rounding import round_to

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
INTEGERS = {8: torch.uint8, 16: torch.int16}
ML_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
SMALL = [name for name, fmt in FORMATS.items() if fmt.significant_bits <= 8]

ALL = pytest.mark.parametrize("name", FORMATS)
CONTAINERS = pytest.mark.parametrize("dtype", BITS, ids=str)
DETERMINISTIC = pytest.mark.parametrize(
    ("mode", "saturate"), list(itertools.product(("nearest", "toward_zero"), (False, True)))
)


def midpoints_and_neighbors(fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of `fmt`, midpoints between them, and what `dtype` has beside those: ends and some binades."""
    codes = range(2 ** (fmt.significant_bits - 1))
    if fmt.significant_bits > 8:
        all_binades = range(0, len(codes), 2**fmt.mantissa_bits)
        binades = sorted({*all_binades[:4], *all_binades[:: max(1, len(all_binades) // 8)], *all_binades[-4:]})
        offsets = (-2, -1, 0, 1, 2, 2 ** (fmt.mantissa_bits - 1))
        codes = sorted({(start + offset) % len(codes) for start in binades for offset in offsets})
    numbers = {value_of_code(code, fmt) for code in codes}
    finite = sorted(number for number in numbers if math.isfinite(number))
    gap_above_max = fmt.max - next_down(fmt.max, fmt)
    above = [min(next_up(low, fmt), fmt.max) if low < fmt.max else low + gap_above_max for low in finite]
    exact = finite + [low + (high - low) / 2 for low, high in zip(finite, above, strict=True)] + above
    exact += [fmt.min_subnormal / 4, fmt.max * 1.5, math.inf, math.nan]
    seeds = torch.tensor(exact, dtype=torch.float64).to(dtype)
    infinity = torch.full_like(seeds, math.inf)
    positive = torch.cat([seeds, torch.nextafter(seeds, infinity), torch.nextafter(seeds, -infinity)])
    return torch.cat([positive, -positive])


def random_bits(dtype: torch.dtype, num: int, seed: int) -> torch.Tensor:
    """Return numbers of uniformly random bits: every exponent, subnormals, infinities and NaNs alike."""
    rng = random.Random(seed)
    width = dtype.itemsize * 8
    return torch.tensor([rng.getrandbits(width) - 2 ** (width - 1) for _ in range(num)], dtype=BITS[dtype]).view(dtype)


def numbers_in_range(fmt: Format, dtype: torch.dtype, num: int, seed: int) -> torch.Tensor:
    """Return random numbers whose exponents are those of `fmt` and three to either side."""
    rng = random.Random(seed)
    low, high = fmt.min_exponent - fmt.mantissa_bits - 3, fmt.max_exponent + 3
    values = [math.ldexp(rng.choice((-1, 1)) * (1 + rng.random()), rng.randint(low, high)) for _ in range(num)]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def differences(x: torch.Tensor, seen: torch.Tensor, expected: list[float]) -> list[tuple[float, float, float]]:
    """Return (input, seen, expected) where two results differ, signs of zero included, NaNs all alike."""
    return [
        (given, a, b)
        for given, a, b in zip(x.tolist(), seen.tolist(), expected, strict=True)
        if not ((math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b)))
    ]


def oracle(x: torch.Tensor, fmt: Format, mode: RoundingMode, saturate: bool) -> list[float]:
    return [round_scalar(value, fmt, mode=mode, saturate=saturate) for value in x.tolist()]


@DETERMINISTIC
@CONTAINERS
@ALL
def test_boundaries_equal_the_oracle(name: str, dtype: torch.dtype, mode: RoundingMode, saturate: bool) -> None:
    fmt = FORMATS[name]
    x = midpoints_and_neighbors(fmt, dtype)
    seen = round_to(x, name, mode=mode, saturate=saturate)
    assert differences(x, seen, oracle(x, fmt, mode, saturate)) == []


@pytest.mark.parametrize("mode", ["nearest", "toward_zero"])
@CONTAINERS
@ALL
def test_random_numbers_equal_the_oracle(name: str, dtype: torch.dtype, mode: RoundingMode) -> None:
    fmt = FORMATS[name]
    x = torch.cat([random_bits(dtype, 300, seed=1), numbers_in_range(fmt, dtype, 300, seed=2)])
    assert differences(x, round_to(x, name, mode=mode), oracle(x, fmt, mode, False)) == []


@pytest.mark.parametrize("saturate", [False, True])
@CONTAINERS
@ALL
def test_stochastic_equals_the_oracle_for_the_same_draws(name: str, dtype: torch.dtype, saturate: bool) -> None:
    fmt = FORMATS[name]
    x = torch.cat([random_bits(dtype, 200, seed=3), numbers_in_range(fmt, dtype, 300, seed=4)])
    seen = round_to(x, name, mode="stochastic", saturate=saturate, generator=torch.Generator().manual_seed(5))
    draws = torch.rand(x.shape, dtype=dtype, generator=torch.Generator().manual_seed(5)).tolist()
    expected = [
        round_scalar(value, fmt, mode="stochastic", saturate=saturate, uniform=uniform)
        for value, uniform in zip(x.tolist(), draws, strict=True)
    ]
    assert differences(x, seen, expected) == []


@CONTAINERS
@ALL
def test_stochastic_decides_at_exactly_the_fraction(name: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    x = torch.tensor([fmt.min_subnormal * 1.25, fmt.min_normal + fmt.min_subnormal / 4], dtype=dtype)
    x = x[[value != round_scalar(value, fmt) for value in x.tolist()]]  # fp32 in fp32 has nothing between its numbers
    quarter = torch.full_like(x, 0.25)
    below_quarter = torch.nextafter(quarter, torch.zeros_like(x))
    for draws, away in ((quarter, False), (below_quarter, True), (torch.zeros_like(x), True)):
        container = rounding._CONTAINERS[dtype]
        seen = rounding._round(x, fmt, container, mode="stochastic", saturate=False, uniform=draws)
        nearer = [round_scalar(value, fmt, mode="toward_zero") for value in x.tolist()]
        assert seen.tolist() == ([next_up(value, fmt) for value in x.tolist()] if away else nearer)


@pytest.mark.parametrize("mode", get_args(RoundingMode))
@CONTAINERS
@pytest.mark.parametrize("name", SMALL)
def test_every_number_of_a_small_format_stays(name: str, dtype: torch.dtype, mode: RoundingMode) -> None:
    fmt = FORMATS[name]
    x = torch.tensor([value_of_code(code, fmt) for code in range(2**fmt.significant_bits)], dtype=dtype)
    assert differences(x, round_to(x, name, mode=mode), x.tolist()) == []


@pytest.mark.parametrize("mode", get_args(RoundingMode))
@pytest.mark.parametrize("name", [name for name in DTYPES if FORMATS[name].storage_bits == 16])
def test_every_number_of_a_16_bit_format_stays(name: str, mode: RoundingMode) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(DTYPES[name]).double()
    seen = round_to(x, name, mode=mode)
    assert torch.equal(seen.isnan(), x.isnan())
    numbers = ~x.isnan()
    assert torch.equal(seen[numbers].view(torch.int64), x[numbers].view(torch.int64))


@pytest.mark.parametrize("name", DTYPES)
def test_float32_casts_of_torch_agree_where_they_do_not_overflow(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.cat([midpoints_and_neighbors(fmt, torch.float32), numbers_in_range(fmt, torch.float32, 5000, seed=6)])
    x = x[x.abs() <= fmt.max]
    cast = x.to(DTYPES[name]).float()
    # The saturating call never takes the shortcut through torch's cast; within range it must round alike.
    assert differences(x, round_to(x, name, saturate=True), cast.tolist()) == []


@pytest.mark.parametrize("name", [name for name in DTYPES if FORMATS[name].has_infinity])
def test_float32_casts_of_torch_overflow_alike(name: str) -> None:
    x = midpoints_and_neighbors(FORMATS[name], torch.float32)
    cast = x.to(DTYPES[name]).float()
    assert differences(x, round_to(x, name), cast.tolist()) == []
    assert differences(x, round_to(x.double(), name).float(), cast.tolist()) == []  # not through the shortcut


@pytest.mark.parametrize("name", ML_DTYPES)
def test_casts_of_ml_dtypes_agree(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.cat([midpoints_and_neighbors(fmt, torch.float32), random_bits(torch.float32, 5000, seed=7)])
    with np.errstate(all="ignore"):
        cast = x.numpy().astype(getattr(ml_dtypes, ML_DTYPES[name])).astype(np.float32).tolist()
    assert differences(x, round_to(x, name), cast) == []
    assert differences(x, round_to(x.double(), name).float(), cast) == []


@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_casts_of_numpy_from_float64_agree(name: str) -> None:
    x = torch.cat([midpoints_and_neighbors(FORMATS[name], torch.float64), random_bits(torch.float64, 3000, seed=8)])
    with np.errstate(all="ignore"):
        cast = x.numpy().astype({"fp16": np.float16, "fp32": np.float32}[name]).astype(np.float64).tolist()
    assert differences(x, round_to(x, name), cast) == []
