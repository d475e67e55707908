"""What a trace takes for computing, casting and moving, on aten ops as a dispatch mode sees them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.runtime import kernels, matmul_precision

X = torch.ones(2, 4)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.kernels: list[kernels.Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kinds.append(kernels.kind_of(func, args, result))
        self.kernels.append(kernels.kernel_of(func, args, kwargs or {}, result))
        return result


def seen(function: Callable[[], Any]) -> Seen:
    with Seen() as mode:
        function()
    return mode


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda: X.bfloat16(), "cast"),
        (lambda: X.to(torch.int64), "cast"),
        (lambda: torch.empty(2, 4, dtype=torch.bfloat16).copy_(X), "cast"),
        (lambda: torch.empty(2, 4).copy_(X), "move"),
        (lambda: X.to(torch.float32, copy=True), "move"),
        (lambda: X.t(), "move"),
        (lambda: X.view(8), "move"),
        (lambda: X.detach(), "move"),
        (lambda: X.clone(), "move"),
        (lambda: torch.zeros(2), "move"),
        (lambda: torch.rand(2), "move"),
        (lambda: X.repeat(2, 1), "move"),
        (lambda: torch.split_with_sizes_copy(X, [1, 1]), "move"),
        (lambda: X + 1, "compute"),
        (lambda: torch.cat([X, X]), "compute"),
        (lambda: X.clone().add_(1), "compute"),
        (lambda: X @ X.t(), "compute"),
        (lambda: F.layer_norm(X, (4,)), "compute"),
    ],
)
def test_kinds(function: Callable[[], Any], kind: str) -> None:
    assert seen(function).kinds[-1] == kind


def test_a_kernel_names_what_it_took_and_gave() -> None:
    (matmul,) = seen(lambda: torch.mm(X.bfloat16(), X.bfloat16().t())).kernels[-1:]
    assert str(matmul) == "mm(bf16, bf16) -> bf16"
    assert matmul.is_matmul
    (sum_,) = seen(lambda: torch.stack([X.double(), X.double()])).kernels[-1:]
    assert (sum_.takes, sum_.gives, sum_.is_matmul) == (("float64", "float64"), ("float64",), False)


def test_statistics_are_not_what_a_kernel_takes() -> None:
    mean, variance = torch.zeros(4), torch.ones(4)
    (norm,) = seen(lambda: F.batch_norm(X.bfloat16(), mean, variance, training=True)).kernels[-1:]
    assert norm.takes == ("bf16",)


def test_the_precision_inside_is_what_torch_is_set_to() -> None:
    found = matmul_precision._write("cpu", "bf16")
    try:
        inside = seen(lambda: X @ X.t()).kernels[-1]
    finally:
        matmul_precision.restore(found)
    assert (inside.inside, inside.formats) == ("bf16", ("fp32 (bf16 inside)",))
    assert str(inside) == "mm(fp32, fp32) -> fp32 [bf16 inside]"
    plain = seen(lambda: X @ X.t()).kernels[-1]
    assert (plain.inside, plain.formats) == ("ieee", ("fp32",))
    assert seen(lambda: X + 1).kernels[-1].inside == ""


def test_backward_kernels_obey_what_their_forward_obeys() -> None:
    assert kernels.unit_of("convolution_backward") == kernels.unit_of("convolution") == "conv"
    assert kernels.unit_of("mkldnn_rnn_layer_backward") == "rnn"
    assert kernels.unit_of("add") is None
