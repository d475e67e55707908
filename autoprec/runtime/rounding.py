"""Round tensors to a format, also to one that the device does not have.

Works on the bits of the numbers, as integers: exact in one rounding from fp32 or fp64 to the format, and deaf to
whether the device flushes subnormal floats to zero. `autoprec.numerics.round_scalar` is the definition it is tested on.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from autoprec.errors import FormatError
from autoprec.numerics import FORMATS, Format, RoundingMode, format_named


@dataclass(frozen=True, kw_only=True, slots=True)
class _Container:
    """A dtype that carries rounded numbers, its format, and the integer dtype of the same width."""

    number: torch.dtype
    bits: torch.dtype
    fmt: Format

    @property
    def mantissa_mask(self) -> int:
        return int(2**self.fmt.mantissa_bits) - 1

    @property
    def infinity(self) -> int:
        """Bits of infinity; those of every NaN, sign aside, are larger."""
        return (int(2**self.fmt.exponent_bits) - 1) << self.fmt.mantissa_bits

    @property
    def quiet_nan(self) -> int:
        return self.infinity | (1 << (self.fmt.mantissa_bits - 1))


# Casts from float32 that round to nearest as `round_scalar` does, in one pass (20 times faster). Not the FP8 ones:
# torch 2.13 saturates e4m3, older versions give NaN.
_EXACT_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}

_FP64 = Format(name="fp64", exponent_bits=11, mantissa_bits=52, storage_bits=64)

_CONTAINERS = {
    row.number: row
    for row in (
        _Container(number=torch.float32, bits=torch.int32, fmt=FORMATS["fp32"]),
        _Container(number=torch.float64, bits=torch.int64, fmt=_FP64),
    )
}


def round_to(
    tensor: Tensor,
    format_name: str,
    *,
    mode: RoundingMode = "nearest",
    saturate: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a new tensor of the dtype of `tensor` with every element rounded to a number of the format.

    Each element is what `autoprec.numerics.round_scalar` gives. `stochastic` draws one uniform number an element from
    `generator`, or from the device's default one; its probabilities are multiples of 2^-24 (fp32) or 2^-53 (fp64).
    No gradient flows through the result.
    Shapes: any, of any strides; the result has the shape of `tensor`.
    Raises: `FormatError` for an unknown format or mode, a dtype other than float32 and float64, or a generator that
    the mode would not use.
    """
    fmt = format_named(format_name)
    container = _container_of(tensor)
    _check_mode(mode, generator)
    if mode == "nearest" and not saturate and tensor.dtype is torch.float32 and fmt.name in _EXACT_CASTS:
        return tensor.detach().to(_EXACT_CASTS[fmt.name]).to(torch.float32)
    uniform = None
    if mode == "stochastic":
        uniform = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
    return _round(tensor, fmt, container, mode=mode, saturate=saturate, uniform=uniform)


def stochastic_bf16(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return an fp32 tensor stochastically rounded to bf16, as bf16: what `round_to` does, fast enough for every step.

    Sixteen random bits are added below the last bit that stays; the carry is the rounding. Probabilities are exact:
    the dropped bits are a multiple of 2^-16 of the gap. Numbers that bf16 has stay as they are.
    """
    num_draws = -(-tensor.numel() // 4)
    draws = torch.empty(num_draws, dtype=torch.int64, device=tensor.device).random_(-(2**63), None, generator=generator)
    random = draws.view(torch.int16)[: tensor.numel()].view(tensor.shape)
    return carried(tensor.detach(), random.to(torch.int32).bitwise_and_(0xFFFF))


def carried(tensor: Tensor, random: Tensor) -> Tensor:
    """Return an fp32 tensor as bf16, rounded away from zero where its low 16 bits and `random` carry."""
    kept = (tensor.view(torch.int32) + random).bitwise_and_(-(1 << 16)).view(torch.float32)
    # A NaN may carry into infinity or zero. On a CPU one sum tells that there is none; a GPU is not waited for.
    if tensor.device.type != "cpu" or bool(tensor.sum().isnan()):
        kept = torch.where(tensor.isnan(), tensor, kept)
    return kept.to(torch.bfloat16)


def _container_of(tensor: Tensor) -> _Container:
    container = _CONTAINERS.get(tensor.dtype)
    if container is None:
        raise FormatError(f"cannot round a {tensor.dtype} tensor; convert it to torch.float32 or torch.float64 first")
    return container


def _check_mode(mode: RoundingMode, generator: torch.Generator | None) -> None:
    modes = get_args(RoundingMode)
    if mode not in modes:
        raise FormatError(f'"{mode}" is not a rounding mode; modes: {", ".join(modes)}')
    if generator is not None and mode != "stochastic":
        raise FormatError(f'mode "{mode}" draws no random numbers; leave generator out, or use mode "stochastic"')


def _round(
    x: Tensor, fmt: Format, container: _Container, *, mode: RoundingMode, saturate: bool, uniform: Tensor | None
) -> Tensor:
    """Return `x` rounded; `uniform` holds the draws of the stochastic mode, one an element."""
    bits = x.view(container.bits)
    magnitude = bits & (container.infinity | container.mantissa_mask)
    sign = bits ^ magnitude
    rounded = magnitude
    if fmt.mantissa_bits < container.fmt.mantissa_bits:  # otherwise it is fp32 in fp32: nothing to round
        rounded = _round_magnitude(magnitude, fmt, container, mode=mode, uniform=uniform)

    largest = int(torch.tensor(fmt.max, dtype=container.number).view(container.bits).item())
    special = container.infinity if fmt.has_infinity else container.quiet_nan
    overflow = largest if saturate else special
    rounded = torch.where(rounded > largest, largest if mode == "toward_zero" else overflow, rounded)
    rounded = torch.where(magnitude == container.infinity, overflow, rounded)
    rounded = torch.where(magnitude > container.infinity, magnitude, rounded)
    return (rounded | sign).view(container.number)


def _round_magnitude(
    magnitude: Tensor, fmt: Format, container: _Container, *, mode: RoundingMode, uniform: Tensor | None
) -> Tensor:
    """Return the bits of finite magnitudes rounded as if `fmt` had no largest number.

    A magnitude is significand * 2^(exponent - mantissa_bits). It lies between `below` and `below` + 1 gaps of 2^gap,
    and the low bits that are dropped, `rest`, decide which of the two it becomes.
    """
    mantissa_bits = container.fmt.mantissa_bits
    field = magnitude >> mantissa_bits
    significand = (magnitude & container.mantissa_mask) | ((field > 0).to(container.bits) << mantissa_bits)
    exponent = field.clamp(min=1) - container.fmt.bias
    gap = exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits

    num_dropped = gap - exponent + mantissa_bits
    # Two more than the mantissa are enough to drop: then `below` is 0 and `rest` less than half a gap, as it should.
    shift = num_dropped.clamp(max=mantissa_bits + 2)
    below = significand >> shift
    rest = significand - (below << shift)
    if mode == "nearest":
        half = torch.ones_like(shift) << (shift - 1)
        below = below + ((rest > half) | ((rest == half) & (below & 1 == 1))).to(container.bits)
    if uniform is not None:
        fraction = rest.to(container.number) * _power_of_two(-num_dropped, container)
        below = below + (uniform < fraction).to(container.bits)
    return _assemble(below, gap, container)


def _assemble(count: Tensor, exponent: Tensor, container: _Container) -> Tensor:
    """Return the bits of count * 2^exponent, for counts below 2^(mantissa_bits + 1).

    The exponent is added to the exponent field of `count` as a float; a subnormal result is shifted into place instead.
    """
    fmt = container.fmt
    count_bits = count.to(container.number).view(container.bits)
    normal = count_bits + exponent * (1 << fmt.mantissa_bits)
    lowest = fmt.min_exponent - fmt.mantissa_bits
    subnormal = count << (exponent - lowest).clamp(min=0, max=fmt.mantissa_bits)
    return torch.where((count_bits >> fmt.mantissa_bits) + exponent > 0, normal, subnormal)


def _power_of_two(exponent: Tensor, container: _Container) -> Tensor:
    """Return 2^exponent, exact, for exponents up to zero; the smallest normal number where that is below it."""
    field = (exponent + container.fmt.bias).clamp(min=1)
    return (field << container.fmt.mantissa_bits).view(container.number)
