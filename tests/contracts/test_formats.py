"""What every row of FORMATS owes: consistent with itself, with torch and with ml_dtypes, code for code."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from autoprec.numerics import FORMATS, round_scalar, ulp, value_of_code
from autoprec.runtime.dtypes import DTYPES

ALL = pytest.mark.parametrize("name", FORMATS)
WITH_DTYPE = pytest.mark.parametrize("name", DTYPES)
SMALL = [name for name, fmt in FORMATS.items() if fmt.significant_bits <= 8]

INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
ML_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def sampled_codes(name: str) -> list[int]:
    """Return all codes of a format of up to 8 bits; of a larger one those near every power of two and some others."""
    fmt = FORMATS[name]
    num_codes = 2**fmt.significant_bits
    if name in SMALL:
        return list(range(num_codes))
    binades = range(0, num_codes, 2**fmt.mantissa_bits)
    near = {(start + offset) % num_codes for start in binades for offset in (-2, -1, 0, 1, 2)}
    return sorted(near | set(range(0, num_codes, num_codes // 997)))


def same(a: float, b: float) -> bool:
    """Return whether two numbers are equal, signs of zero included, or both NaN."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@ALL
def test_is_frozen_and_named_as_its_key(name: str) -> None:
    fmt = FORMATS[name]
    assert fmt.name == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.mantissa_bits = 1  # type: ignore[misc]


@ALL
def test_fits_its_storage_and_fp64(name: str) -> None:
    fmt = FORMATS[name]
    assert fmt.significant_bits <= fmt.storage_bits
    assert math.isfinite(fmt.max)
    assert fmt.min_subnormal > 0


@ALL
def test_numbers_ascend_with_their_codes(name: str) -> None:
    fmt = FORMATS[name]
    positive = [value_of_code(code, fmt) for code in sampled_codes(name) if code < 2 ** (fmt.significant_bits - 1)]
    numbers = [number for number in positive if not math.isnan(number)]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0.0
    assert numbers[-1] == (math.inf if fmt.has_infinity else fmt.max)


@ALL
def test_named_values_are_codes(name: str) -> None:
    fmt = FORMATS[name]
    first_normal = 2**fmt.mantissa_bits
    last = 2 ** (fmt.significant_bits - 1) - 1 - fmt.num_nan_codes // 2 - (1 if fmt.has_infinity else 0)
    assert value_of_code(1, fmt) == fmt.min_subnormal
    assert value_of_code(first_normal, fmt) == fmt.min_normal
    assert value_of_code(last, fmt) == fmt.max
    one = fmt.bias << fmt.mantissa_bits
    assert value_of_code(one, fmt) == 1.0
    assert value_of_code(one + 1, fmt) == 1.0 + fmt.eps
    assert ulp(1.0, fmt) == fmt.eps == 2 * fmt.unit_roundoff


@ALL
def test_max_exact_integer_is_the_last_before_a_gap(name: str) -> None:
    fmt = FORMATS[name]
    n = fmt.max_exact_integer
    assert n <= fmt.max
    assert all(round_scalar(float(i), fmt) == i for i in (*range(min(n, 300)), n - 1, n))
    assert round_scalar(float(n + 1), fmt) != n + 1


@pytest.mark.parametrize("name", SMALL)
def test_nan_codes_are_counted(name: str) -> None:
    fmt = FORMATS[name]
    numbers = [value_of_code(code, fmt) for code in range(2**fmt.significant_bits)]
    assert sum(map(math.isnan, numbers)) == fmt.num_nan_codes
    assert sum(map(math.isinf, numbers)) == (2 if fmt.has_infinity else 0)


@WITH_DTYPE
def test_codes_mean_what_torch_takes_them_for(name: str) -> None:
    fmt = FORMATS[name]
    codes = sampled_codes(name)
    signed = [code - 2**fmt.storage_bits if code >= 2 ** (fmt.storage_bits - 1) > 2**8 else code for code in codes]
    seen = torch.tensor(signed, dtype=INTEGERS[fmt.storage_bits]).view(DTYPES[name]).double().tolist()
    wrong = [
        (code, value) for code, value in zip(codes, seen, strict=True) if not same(value, value_of_code(code, fmt))
    ]
    assert wrong == []


@WITH_DTYPE
def test_facts_equal_those_of_torch(name: str) -> None:
    fmt, facts = FORMATS[name], torch.finfo(DTYPES[name])
    assert (fmt.storage_bits, fmt.max, fmt.eps) == (facts.bits, facts.max, facts.eps)
    assert (fmt.min_normal, fmt.min_subnormal) == (facts.smallest_normal, ulp(0.0, fmt))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_facts_equal_those_of_ml_dtypes(name: str) -> None:
    ml_dtypes: Any = pytest.importorskip("ml_dtypes")
    fmt, facts = FORMATS[name], ml_dtypes.finfo(getattr(ml_dtypes, ML_DTYPES[name]))
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (facts.nexp, facts.nmant)
    assert (fmt.max, fmt.min_normal) == (float(facts.max), float(facts.smallest_normal))
    assert (fmt.min_subnormal, fmt.eps) == (float(facts.smallest_subnormal), float(facts.eps))
