"""What one reading of a tensor tells of its numbers: exponents, extremes, and what rounding to a format would do."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import torch

from autoprec.analysis.histogram import ExponentHistogram, add_counts, count_exponents
from autoprec.analysis.pieces import pieces_of
from autoprec.numerics import FORMATS, Format, format_named
from autoprec.runtime.rounding import round_to


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """What rounding a tensor to a format does.

    `num_overflow` finite elements become infinite or NaN. `error_norm` is the Euclidean norm of the rounding errors of
    the others, `norm` that of these others themselves.
    """

    num_overflow: int = 0
    error_norm: float = 0.0
    norm: float = 0.0

    @property
    def relative_error(self) -> float:
        """Return the root mean square of the errors over that of the numbers.

        0 if all are zero, and for float64 numbers whose norm float64 cannot hold.
        """
        return self.error_norm / self.norm if 0 < self.norm < math.inf else 0.0

    def __add__(self, other: "Rounding") -> "Rounding":
        """Return what rounding both sets of elements does."""
        return Rounding(
            num_overflow=self.num_overflow + other.num_overflow,
            error_norm=math.hypot(self.error_norm, other.error_norm),
            norm=math.hypot(self.norm, other.norm),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNumerics:
    """The numbers of one tensor, or of several that have the same role.

    `minimum` and `maximum` are those of the finite elements, 0 if there are none. `rounding` has one entry for each
    format that was asked for. The parts of complex numbers count one by one.
    """

    histogram: ExponentHistogram = field(default_factory=ExponentHistogram)
    num_nan: int = 0
    minimum: float = 0.0
    maximum: float = 0.0
    rounding: Mapping[str, Rounding] = field(default_factory=lambda: MappingProxyType({}))
    num_tensors: int = 1

    @property
    def num_inf(self) -> int:
        """Return the number of infinities."""
        return self.histogram.num_nonfinite - self.num_nan

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return self.histogram.num_nonzero + self.histogram.num_zero + self.histogram.num_nonfinite

    def __add__(self, other: "TensorNumerics") -> "TensorNumerics":
        """Return the numbers of both. Both must have been measured for the same formats."""
        extremes = [each for each in (self, other) if each.num_elements > each.histogram.num_nonfinite]
        return TensorNumerics(
            histogram=self.histogram + other.histogram,
            num_nan=self.num_nan + other.num_nan,
            minimum=min((each.minimum for each in extremes), default=0.0),
            maximum=max((each.maximum for each in extremes), default=0.0),
            rounding={name: self.rounding[name] + other.rounding[name] for name in self.rounding},
            num_tensors=self.num_tensors + other.num_tensors,
        )


def tensor_numerics(tensor: torch.Tensor, formats: Sequence[str]) -> TensorNumerics:
    """Return the numbers of `tensor`, read once, in pieces; of a sparse tensor, of its stored values.

    Shapes: any. Dtypes: every floating or complex one; numbers that a format has are rounded without error.
    """
    return numerics_of_pieces(pieces_of(tensor), formats)


def numerics_of_pieces(pieces: Iterable[tuple[torch.Tensor, int]], formats: Sequence[str]) -> TensorNumerics:
    """Return the numbers of all `pieces`: flat tensors in float32 or float64, and how many times each counts."""
    tally = _Tally(formats)
    with torch.no_grad():
        for piece, times in pieces:
            tally.add(piece, times)
    return tally.numerics()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A format to round to, with what is needed of it for every piece."""

    name: str
    max: float
    cast: Callable[[torch.Tensor], torch.Tensor] | None  # from float32, if it is quick and right for every number
    addend: tuple[int, int] | None  # for `_rounded_by_addition`


@lru_cache(maxsize=64)
def _targets(names: tuple[str, ...]) -> tuple[_Target, ...]:
    return tuple(_target(format_named(name)) for name in names)


_CASTS = {"bf16": torch.Tensor.bfloat16, "fp16": torch.Tensor.half}
_FP32 = FORMATS["fp32"]


def _target(low: Format) -> _Target:
    lowest = (low.min_exponent + _FP32.bias) << _FP32.mantissa_bits
    lift = (_FP32.mantissa_bits - low.mantissa_bits) << _FP32.mantissa_bits
    can_add = low.mantissa_bits < _FP32.mantissa_bits - 1 and low.name not in _CASTS
    return _Target(name=low.name, max=low.max, cast=_CASTS.get(low.name), addend=(lowest, lift) if can_add else None)


class _Tally:
    """Sums over the pieces of one tensor."""

    def __init__(self, formats: Sequence[str]) -> None:
        self._counts: dict[int, int] = {}
        self._num_zero = self._num_nonfinite = self._num_nan = 0
        self._minimum, self._maximum = math.inf, -math.inf
        self._targets = _targets(tuple(formats))
        self._rounding: list[Rounding | None] = [None] * len(self._targets)

    def add(self, piece: torch.Tensor, times: int) -> None:
        magnitudes = piece.abs()
        found = count_exponents(magnitudes)
        add_counts(self._counts, found.counts, times)
        self._num_zero += found.num_zero * times
        if found.num_nonfinite:
            self._num_nonfinite += found.num_nonfinite * times
            self._num_nan += int(piece.isnan().sum()) * times
            piece = piece[piece.isfinite()]
            magnitudes = piece.abs()
        if piece.numel() == 0:
            return
        low, high = torch.aminmax(piece)
        minimum, maximum = low.item(), high.item()
        self._minimum, self._maximum = min(self._minimum, minimum), max(self._maximum, maximum)
        max_abs = max(-minimum, maximum)
        norm = _norm(magnitudes, max_abs)
        for index, target in enumerate(self._targets):
            rounding = _rounding(magnitudes, target, max_abs, norm)
            rounding = rounding if times == 1 else _repeated(rounding, times)
            before = self._rounding[index]
            self._rounding[index] = rounding if before is None else before + rounding

    def numerics(self) -> TensorNumerics:
        is_any = self._minimum <= self._maximum
        minimum, maximum = (self._minimum, self._maximum) if is_any else (0.0, 0.0)
        return TensorNumerics(
            histogram=ExponentHistogram(
                counts=tuple(sorted(self._counts.items())),
                num_zero=self._num_zero,
                num_nonfinite=self._num_nonfinite,
                max_abs=max(-minimum, maximum),
            ),
            num_nan=self._num_nan,
            minimum=minimum,
            maximum=maximum,
            rounding={
                target.name: each or Rounding() for target, each in zip(self._targets, self._rounding, strict=True)
            },
        )


def _repeated(rounding: Rounding, times: int) -> Rounding:
    return Rounding(
        num_overflow=rounding.num_overflow * times,
        error_norm=rounding.error_norm * math.sqrt(times),
        norm=rounding.norm * math.sqrt(times),
    )


# Squares of float32 numbers between these, and sums of a piece of them, are normal float32 numbers with room to spare.
_SMALLEST_SQUARABLE, _LARGEST_SQUARABLE = 2.0**-40, 2.0**50


def _norm(numbers: torch.Tensor, max_abs: float) -> float:
    """Return the Euclidean norm of `numbers`, none of which is larger than `max_abs`."""
    if max_abs == 0:
        return 0.0
    if _SMALLEST_SQUARABLE <= max_abs <= _LARGEST_SQUARABLE:
        return math.sqrt(torch.dot(numbers, numbers).item())
    scaled = numbers / max_abs
    return max_abs * math.sqrt(torch.dot(scaled, scaled).item())


def _rounding(magnitudes: torch.Tensor, target: _Target, max_abs: float, norm: float) -> Rounding:
    rounded = _rounded(magnitudes, target, max_abs)
    if max_abs <= target.max:
        return Rounding(error_norm=_norm(magnitudes - rounded, max_abs), norm=norm)
    is_kept = rounded <= target.max  # neither infinity nor NaN is
    kept = magnitudes[is_kept]
    largest = float(kept.max()) if kept.numel() else 0.0
    return Rounding(
        num_overflow=magnitudes.numel() - kept.numel(),
        error_norm=_norm(kept - rounded[is_kept], largest),
        norm=_norm(kept, largest),
    )


_LARGEST_ADDEND = 2.0**100


def _rounded(magnitudes: torch.Tensor, target: _Target, max_abs: float) -> torch.Tensor:
    """Return `magnitudes` rounded to nearest; what overflows is larger than `target.max`, or NaN."""
    if magnitudes.dtype == torch.float32:
        if target.cast is not None:
            return target.cast(magnitudes)
        if target.addend is not None and max_abs < _LARGEST_ADDEND:
            return _rounded_by_addition(magnitudes, *target.addend)
    return round_to(magnitudes, target.name)


def _rounded_by_addition(magnitudes: torch.Tensor, lowest: int, lift: int) -> torch.Tensor:
    """Return float32 `magnitudes` rounded to nearest, several times as fast as by their bits.

    Next to 2**23 gaps of a format, the numbers of float32 are one gap apart, so its addition rounds. `lowest` are the
    bits of the smallest normal number of the format, `lift` added to a number's bits makes it the addend.
    """
    fields = magnitudes.view(torch.int32).bitwise_and(0xFF << _FP32.mantissa_bits)
    addends = fields.clamp_(min=lowest).add_(lift).view(torch.float32)
    return (magnitudes + addends).sub_(addends)
