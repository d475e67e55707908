import math

import pytest

from autoprec.errors import FormatError
from autoprec.numerics import FORMATS, Format, format_named, value_of_code


def test_the_formats_are_those_of_the_design() -> None:
    assert list(FORMATS) == ["fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]


# Published constants: IEEE 754-2019 table 3.5, OFP8 revision 1.0 table 1, PTX ISA for bf16 and tf32.
# Columns: max, min_normal, min_subnormal, eps, bias.
PUBLISHED = {
    "fp32": ((2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23, 127),
    "tf32": ((2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10, 127),
    "bf16": ((2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7, 127),
    "fp16": (65504.0, 2.0**-14, 2.0**-24, 2.0**-10, 15),
    "fp8_e4m3": (448.0, 2.0**-6, 2.0**-9, 2.0**-3, 7),
    "fp8_e5m2": (57344.0, 2.0**-14, 2.0**-16, 2.0**-2, 15),
}


@pytest.mark.parametrize("name", FORMATS)
def test_computed_facts_equal_the_published_ones(name: str) -> None:
    fmt = FORMATS[name]
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.eps, fmt.bias) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "max_exact_integer"),
    [("fp32", 2**24), ("tf32", 2048), ("bf16", 256), ("fp16", 2048), ("fp8_e4m3", 16), ("fp8_e5m2", 8)],
)
def test_max_exact_integer(name: str, max_exact_integer: int) -> None:
    assert FORMATS[name].max_exact_integer == max_exact_integer


@pytest.mark.parametrize(
    ("name", "has_infinity", "num_nan_codes", "max_exponent"),
    [("fp16", True, 2046, 15), ("bf16", True, 254, 127), ("fp8_e4m3", False, 2, 8), ("fp8_e5m2", True, 6, 15)],
)
def test_special_codes(name: str, has_infinity: bool, num_nan_codes: int, max_exponent: int) -> None:
    fmt = FORMATS[name]
    assert (fmt.has_infinity, fmt.num_nan_codes, fmt.max_exponent) == (has_infinity, num_nan_codes, max_exponent)


def test_tf32_is_stored_in_32_bits_but_means_19() -> None:
    assert (FORMATS["tf32"].storage_bits, FORMATS["tf32"].significant_bits) == (32, 19)


def test_format_named_returns_the_row() -> None:
    assert format_named("bf16") is FORMATS["bf16"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("fp8_e4m3fn", "fp8_e4m3"), ("f32", "fp32"), ("float32", "fp32")],
)
def test_unknown_name_lists_the_formats_and_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(FormatError) as raised:
        format_named(name)
    assert str(raised.value) == (
        f'"{name}" is not a format; formats: fp32, tf32, bf16, fp16, fp8_e4m3, fp8_e5m2; nearest: "{nearest}"'
    )


def test_a_name_near_nothing_gets_no_suggestion() -> None:
    with pytest.raises(FormatError, match=r'"zzz" is not a format; formats: [^;]*$'):
        format_named("zzz")


def test_value_of_code_at_the_corners_of_e4m3() -> None:
    fmt = FORMATS["fp8_e4m3"]
    assert [value_of_code(code, fmt) for code in (0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE)] == [
        0.0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 1.0, 448.0, -448.0
    ]  # fmt: skip
    assert math.copysign(1.0, value_of_code(0x80, fmt)) == -1.0
    assert math.isnan(value_of_code(0x7F, fmt))
    assert math.isnan(value_of_code(0xFF, fmt))


@pytest.mark.parametrize("code", [-1, 256])
def test_a_code_with_too_many_bits_is_an_error(code: int) -> None:
    with pytest.raises(FormatError, match="not a code of fp8_e5m2; codes: 0 to 255"):
        value_of_code(code, FORMATS["fp8_e5m2"])


def test_a_new_row_needs_nothing_but_its_facts() -> None:
    e2m1 = Format(name="fp4_e2m1x", exponent_bits=2, mantissa_bits=1, storage_bits=4)
    finite = [value_of_code(code, e2m1) for code in range(6)]
    assert finite == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
    assert e2m1.max == 3.0
