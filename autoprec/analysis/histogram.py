"""Histograms of exponents: at which powers of two the elements of a tensor lie, and what a format makes of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autoprec.analysis.pieces import pieces_of
from autoprec.numerics import Format, round_scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentHistogram:
    """How many elements lie in [2**k, 2**(k + 1)), for every k that occurs, in ascending order.

    `max_abs` is the largest finite magnitude, 0 if there is none. All fractions are of the finite elements other than
    zero, and 0 if there are none. They take a loss scale, by which every element is multiplied before it is rounded.
    """

    counts: tuple[tuple[int, int], ...] = ()
    num_zero: int = 0
    num_nonfinite: int = 0
    max_abs: float = 0.0

    @property
    def num_nonzero(self) -> int:
        """Return the number of finite elements other than zero."""
        return sum(count for _, count in self.counts)

    def frac_below(self, exponent: int) -> float:
        """Return the fraction of the nonzero elements that is below 2**`exponent`; 0 if there are none."""
        return sum(count for k, count in self.counts if k < exponent) / max(self.num_nonzero, 1)

    def norm_frac_below(self, exponent: int) -> float:
        """Return which fraction of the Euclidean norm the elements below 2**`exponent` make up by themselves.

        Every element counts as the lower end of its bin, so the fraction is right within a factor of 2.
        """
        if not self.counts:
            return 0.0
        top = self.counts[-1][0]  # as the unit, so that squares neither overflow nor all vanish
        squares = [(k, count * 4.0 ** (k - top)) for k, count in self.counts]
        return float((sum(s for k, s in squares if k < exponent) / sum(s for _, s in squares)) ** 0.5)

    def flush_frac(self, low: Format, scale: float = 1.0) -> float:
        """Return the fraction that rounds to zero in `low`.

        Exact for a power of two as the scale, but for elements of exactly half the smallest number: they count as kept
        although they round to even, which is zero. For another scale, elements in the bin of the bound count as spread
        evenly over it.
        """
        return self._num_below(low.min_subnormal / 2, scale) / max(self.num_nonzero, 1)

    def subnormal_frac(self, low: Format, scale: float = 1.0) -> float:
        """Return the fraction below the smallest normal number of `low`: what loses digits, or everything.

        Exact for a power of two as the scale; else as `flush_frac`.
        """
        return self._num_below(low.min_normal, scale) / max(self.num_nonzero, 1)

    def overflow_frac(self, low: Format, scale: float = 1.0) -> float:
        """Return the fraction that rounds to an infinity, or to NaN in a format without infinity.

        It is 0 exactly if nothing overflows. Elements in the bin of the bound count as spread evenly over it, but at
        least one: the bound is no power of two.
        """
        if not self.counts or math.isfinite(round_scalar(self.max_abs * scale, low)):
            return 0.0
        half_gap = math.ldexp(1.0, low.max_exponent - low.mantissa_bits - 1)
        beyond = self.num_nonzero - self._num_below(low.max + half_gap, scale)
        return max(beyond, 1.0) / self.num_nonzero

    def headroom(self, low: Format) -> float | None:
        """Return log2 of the largest number of `low` over the largest element; None if there is none but zeros.

        *Units*: powers of two. Negative if an element is beyond the range.
        """
        return math.log2(low.max) - math.log2(self.max_abs) if self.max_abs else None

    def _num_below(self, bound: float, scale: float) -> float:
        """Return how many elements times `scale` are below `bound`; a part of the bin that `bound` lies in."""
        significand, exponent = math.frexp(bound / scale)
        frac, at = significand * 2 - 1, exponent - 1
        return sum(count * (1.0 if k < at else frac) for k, count in self.counts if k <= at)

    def __add__(self, other: "ExponentHistogram") -> "ExponentHistogram":
        """Return the histogram of both sets of elements."""
        counts = dict(self.counts)
        for k, count in other.counts:
            counts[k] = counts.get(k, 0) + count
        return ExponentHistogram(
            counts=tuple(sorted(counts.items())),
            num_zero=self.num_zero + other.num_zero,
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
            max_abs=max(self.max_abs, other.max_abs),
        )


def exponent_histogram(tensor: torch.Tensor) -> ExponentHistogram:
    """Return the histogram of the exponents of `tensor`; of a sparse tensor, of its stored values.

    Reads the tensor in pieces, so that it needs little memory of its own. Parts of complex numbers count one by one.

    Shapes: any. Dtypes: every floating or complex one.
    """
    counts: dict[int, int] = {}
    num_zero, num_nonfinite, max_abs = 0, 0, 0.0
    for piece, times in pieces_of(tensor):
        magnitudes = piece.abs()
        found = count_exponents(magnitudes)
        add_counts(counts, found.counts, times)
        num_zero, num_nonfinite = num_zero + found.num_zero * times, num_nonfinite + found.num_nonfinite * times
        finite = magnitudes[magnitudes.isfinite()] if found.num_nonfinite else magnitudes
        max_abs = max(max_abs, float(finite.max()) if finite.numel() else 0.0)
    return ExponentHistogram(
        counts=tuple(sorted(counts.items())), num_zero=num_zero, num_nonfinite=num_nonfinite, max_abs=max_abs
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentCounts:
    """How many numbers have which exponent, in no order, and how many have none."""

    counts: Mapping[int, int]
    num_zero: int
    num_nonfinite: int


def count_exponents(magnitudes: torch.Tensor) -> ExponentCounts:
    """Return the counts of flat numbers without sign: by the exponent field of their bits, and nothing is sorted.

    Dtypes: float32, float64.
    """
    integers, mantissa_bits, num_fields = _FIELDS[magnitudes.dtype]
    fields = magnitudes.view(integers).bitwise_right_shift(mantissa_bits)
    found = torch.bincount(fields, minlength=num_fields).cpu().numpy()
    present = found.nonzero()[0]
    bias = num_fields // 2 - 1
    counts = {field - bias: count for field, count in zip(present.tolist(), found[present].tolist(), strict=True)}
    num_nonfinite, num_small = counts.pop(bias + 1, 0), counts.pop(-bias, 0)
    num_zero = num_small and magnitudes.numel() - int(magnitudes.count_nonzero())
    if num_small > num_zero:  # subnormal numbers have no exponent field of their own
        add_counts(counts, _count_subnormal(magnitudes))
    return ExponentCounts(counts=counts, num_zero=num_zero, num_nonfinite=num_nonfinite)


def add_counts(total: dict[int, int], counts: Mapping[int, int], times: int = 1) -> None:
    """Add `counts`, `times` times, to `total`."""
    for exponent, count in counts.items():
        total[exponent] = total.get(exponent, 0) + count * times


def _count_subnormal(magnitudes: torch.Tensor) -> dict[int, int]:
    small = magnitudes[(magnitudes > 0) & (magnitudes < torch.finfo(magnitudes.dtype).smallest_normal)]
    exponents, counts = torch.frexp(small).exponent.unique(return_counts=True)
    return dict(zip((exponents - 1).tolist(), counts.tolist(), strict=True))


# By dtype: integers of the same width, the bits below the exponent field, and how many values that field has.
_FIELDS = {torch.float32: (torch.int32, 23, 1 << 8), torch.float64: (torch.int64, 52, 1 << 11)}
