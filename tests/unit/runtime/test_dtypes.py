import pytest
import torch

from autoprec.errors import FormatError
from autoprec.numerics import FORMATS
from autoprec.runtime.dtypes import DTYPES, format_of, torch_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_round_trip(name: str) -> None:
    assert format_of(torch_dtype(name)) == name
    assert torch_dtype(name).itemsize * 8 == FORMATS[name].storage_bits


def test_every_format_but_tf32_has_a_dtype() -> None:
    assert set(FORMATS) - set(DTYPES) == {"tf32"}


def test_tf32_says_where_it_exists() -> None:
    with pytest.raises(FormatError, match=r'"tf32" has no torch dtype.*set float32_matmul to "tf32"'):
        torch_dtype("tf32")


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(FormatError, match=r'"bfloat16" is not a format;.*nearest: "bf16"'):
        torch_dtype("bfloat16")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_a_dtype_of_no_format(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=rf"{dtype} holds none of autoprec's formats; dtypes that do: torch.float32"):
        format_of(dtype)
