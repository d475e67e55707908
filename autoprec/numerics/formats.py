"""The number formats: one row each, independent facts stated, everything else computed from them."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from autoprec.errors import FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format: a sign, `exponent_bits`, and `mantissa_bits` after the implicit one.

    `special` says where infinities and NaNs live: `top_exponent`, the codes whose exponent bits are all ones are
    infinity (mantissa zero) and NaNs, as in IEEE 754; `top_code`, only the code of all ones is special, it is a NaN,
    and there is no infinity, as in the OCP format E4M3.
    `storage_bits` counts the memory of one number: tf32 has 19 significant bits and is stored in 32.
    Source: IEEE 754-2019, section 3.4; OCP 8-bit Floating Point Specification (OFP8), revision 1.0, section 5.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    storage_bits: int
    special: Literal["top_exponent", "top_code"] = "top_exponent"

    @property
    def has_infinity(self) -> bool:
        """Whether an overflow can be told from an undefined result."""
        return self.special == "top_exponent"

    @property
    def significant_bits(self) -> int:
        """Bits of a code that carry meaning: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def num_nan_codes(self) -> int:
        """Number of codes that are NaN, both signs counted."""
        return 2 * (2**self.mantissa_bits - 1) if self.has_infinity else 2

    @property
    def precision(self) -> int:
        """Bits of the significand of a normal number, the implicit one included (p in IEEE 754)."""
        return self.mantissa_bits + 1

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field to give the exponent."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        top = int(2**self.exponent_bits) - 1 - self.bias
        return top - 1 if self.has_infinity else top

    @property
    def max(self) -> float:
        """The largest finite number."""
        all_ones = int(2**self.precision) - 1
        significand = all_ones if self.has_infinity else all_ones - 1
        return math.ldexp(significand, self.max_exponent - self.mantissa_bits)

    @property
    def min_normal(self) -> float:
        """The smallest positive number of full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The spacing of numbers at 1, what `torch.finfo` calls eps."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding to nearest in the normal range (u in Higham 2002, section 2.1)."""
        return self.eps / 2

    @property
    def max_exact_integer(self) -> int:
        """The largest n such that every integer of magnitude up to n is a number of the format."""
        return int(2**self.precision)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        row.name: row
        for row in (
            Format(name="fp32", exponent_bits=8, mantissa_bits=23, storage_bits=32),
            Format(name="tf32", exponent_bits=8, mantissa_bits=10, storage_bits=32),
            Format(name="bf16", exponent_bits=8, mantissa_bits=7, storage_bits=16),
            Format(name="fp16", exponent_bits=5, mantissa_bits=10, storage_bits=16),
            Format(name="fp8_e4m3", exponent_bits=4, mantissa_bits=3, storage_bits=8, special="top_code"),
            Format(name="fp8_e5m2", exponent_bits=5, mantissa_bits=2, storage_bits=8),
        )
    }
)


def format_named(name: str) -> Format:
    """Return the row of `FORMATS` called `name`.

    Raises: `FormatError` that lists the names and the nearest one if there is no such row.
    """
    row = FORMATS.get(name)
    if row is None:
        similarity = {known: difflib.SequenceMatcher(a=str(name), b=known).ratio() for known in FORMATS}
        # Of equally similar ones that with the same first letter: float16 is fp16 rather than bf16.
        nearest = max(FORMATS, key=lambda known: (similarity[known], str(name).startswith(known[0])))
        begun = [known for known in FORMATS if name and known.startswith(str(name))]
        near = " or ".join(f'"{known}"' for known in begun) or (f'"{nearest}"' if similarity[nearest] >= 0.4 else "")
        hint = f"; nearest: {near}" if near else ""
        raise FormatError(f'"{name}" is not a format; formats: {", ".join(FORMATS)}{hint}')
    return row


def value_of_code(code: int, fmt: Format) -> float:
    """Return the number that the `significant_bits` of `code` stand for in `fmt`.

    Raises: `FormatError` if `code` has more bits than that.
    Source: IEEE 754-2019, section 3.4.
    """
    if not 0 <= code < 2**fmt.significant_bits:
        raise FormatError(f"{code} is not a code of {fmt.name}; codes: 0 to {2**fmt.significant_bits - 1}")
    sign = -1.0 if code >> (fmt.significant_bits - 1) else 1.0
    exponent = (code >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    mantissa = code & (2**fmt.mantissa_bits - 1)
    if exponent == 2**fmt.exponent_bits - 1:
        if fmt.has_infinity:
            return sign * math.inf if mantissa == 0 else math.nan
        if mantissa == 2**fmt.mantissa_bits - 1:
            return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, fmt.min_exponent - fmt.mantissa_bits)
    return sign * math.ldexp(2**fmt.mantissa_bits + mantissa, exponent - fmt.bias - fmt.mantissa_bits)
