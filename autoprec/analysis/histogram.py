"""Histograms of exponents: at which powers of two the elements of a tensor lie."""

from dataclasses import dataclass

import torch

# frexp writes |x| = m * 2**e with 1/2 <= m < 1. For every float64, and so for every narrower one, e is in this range.
_LOWEST, _HIGHEST = -1073, 1024
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentHistogram:
    """How many elements lie in [2**k, 2**(k + 1)), for every k that occurs, in ascending order.

    `max_abs` is the largest finite magnitude, 0 if there is none.
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

    Reads the tensor in pieces, so that it needs little memory of its own.

    Shapes: any. Dtypes: every floating one.
    """
    dense = tensor.detach()
    dense = dense.coalesce().values() if dense.layout == torch.sparse_coo else dense
    total = ExponentHistogram()
    for chunk in dense.reshape(-1).split(_CHUNK):
        total += _of_chunk(chunk)
    return total


def _of_chunk(chunk: torch.Tensor) -> ExponentHistogram:
    wide = chunk if chunk.dtype == torch.float64 else chunk.to(torch.float32)
    magnitudes = wide.abs()
    finite = magnitudes[magnitudes.isfinite()]
    nonzero = finite[finite > 0]
    num_zero, num_nonfinite = finite.numel() - nonzero.numel(), chunk.numel() - finite.numel()
    if nonzero.numel() == 0:
        return ExponentHistogram(num_zero=num_zero, num_nonfinite=num_nonfinite)
    exponents = torch.frexp(nonzero).exponent.long() - _LOWEST
    counts = torch.bincount(exponents, minlength=_HIGHEST - _LOWEST + 1).tolist()
    return ExponentHistogram(
        counts=tuple((index + _LOWEST - 1, count) for index, count in enumerate(counts) if count),
        num_zero=num_zero,
        num_nonfinite=num_nonfinite,
        max_abs=float(nonzero.max()),
    )
