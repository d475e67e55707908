"""FP8 products without a GPU: torch's checks for CUDA judge shapes, its CPU kernel stands in for tensor cores.

So the path that a GPU takes runs here, rows of zeros included, and must give what emulation gives.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch._meta_registrations as meta

from autoprec.ops import float8_fault
from autoprec.policy import Scaling
from autoprec.runtime.float8 import float8_product


@pytest.fixture
def checked_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch._scaled_mm

    def checked(a: torch.Tensor, b: torch.Tensor, **settings: Any) -> torch.Tensor:
        meta.meta_scaled_mm(a, b, **settings)
        return kernel(a, b, **{**settings, "use_fast_accum": False})  # the CPU kernel has no other accumulation

    monkeypatch.setattr(meta, "device_hint", lambda _: "cuda")
    monkeypatch.setattr(torch, "_scaled_mm", checked)


def _all_three(scaling: Scaling, shape: tuple[int, int, int], *, emulated: bool) -> tuple[torch.Tensor, ...]:
    """Return the product of rows and a matrix of a linear layer, and its two gradients."""
    torch.manual_seed(0)
    num_rows, width, height = shape
    rows = torch.randn(num_rows, width).bfloat16().requires_grad_()
    weight = torch.randn(height, width, requires_grad=True)
    result = float8_product(scaling, emulated=emulated)(rows, weight.t())
    return (result, *torch.autograd.grad(result.float().square().sum(), [rows, weight]))


@pytest.mark.usefixtures("checked_as_on_cuda")
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", [*product((1, 5, 16, 37), (16, 24, 48), (16, 32, 40))])
def test_shapes_without_a_fault_run_as_emulated_and_no_others_run(
    scaling: Scaling, shape: tuple[int, int, int]
) -> None:
    num_rows, width, height = shape
    if float8_fault("linear", [(num_rows, width), (height, width)]):
        with pytest.raises(RuntimeError, match="to be divisible by 16"):
            _all_three(scaling, shape, emulated=False)
        return
    ours, expected = (_all_three(scaling, shape, emulated=emulated) for emulated in (False, True))
    # Products of FP8 numbers are exact in FP32, so only the order of sums can differ: by one unit in the last place of
    # bf16, 2^-7 of the number, where a sum is close to a tie, and where terms cancel by 48 roundings of FP32 to 2^-24.
    for our, its in zip(ours, expected, strict=True):
        torch.testing.assert_close(our, its, rtol=2.0**-7, atol=float(its.detach().abs().max()) * 48 * 2.0**-24)
