"""Which torch dtype holds the numbers of a format."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from autoprec.errors import FormatError
from autoprec.numerics import format_named

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def torch_dtype(format_name: str) -> torch.dtype:
    """Return the torch dtype whose numbers are those of the format.

    Raises: `FormatError` for an unknown format, and for tf32, which exists only inside matmuls of FP32 tensors.
    """
    row = format_named(format_name)
    dtype = DTYPES.get(row.name)
    if dtype is None:
        raise FormatError(
            f'format "{row.name}" has no torch dtype: its numbers are stored as fp32; formats with one: '
            f'{", ".join(DTYPES)}; for tf32 inside matmuls set float32_matmul to "tf32"'
        )
    return dtype


def format_of(dtype: torch.dtype) -> str:
    """Return the name of the format whose numbers `dtype` holds.

    Raises: `FormatError` for a dtype that holds none of the formats, such as float64 or an integer.
    """
    name = _NAMES.get(dtype)
    if name is None:
        allowed = ", ".join(str(known) for known in _NAMES)
        raise FormatError(f"{dtype} holds none of autoprec's formats; dtypes that do: {allowed}")
    return name
