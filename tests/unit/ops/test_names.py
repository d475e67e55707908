"""Every spelling of an op folds into one name."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from autoprec.ops import canonical_name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("add", "add"),
        ("add_", "add"),
        ("__add__", "add"),
        ("__radd__", "add"),
        ("__iadd__", "add"),
        ("rsub", "sub"),
        ("__rsub__", "sub"),
        ("subtract", "sub"),
        ("true_divide", "div"),
        ("__truediv__", "div"),
        ("__rtruediv__", "div"),
        ("__idiv__", "div"),
        ("divide_", "div"),
        ("multiply", "mul"),
        ("__rpow__", "pow"),
        ("__matmul__", "matmul"),
        ("__rmatmul__", "matmul"),
        ("linalg_matmul", "matmul"),
        ("__getitem__", "getitem"),
        ("__setitem__", "setitem"),
        ("__get__", "get"),
        ("__set__", "set"),
        ("set_", "set"),
        ("concat", "cat"),
        ("concatenate", "cat"),
        ("__and__", "bitwise_and"),
        ("__rand__", "bitwise_and"),
        ("rand", "rand"),
        ("__ror__", "bitwise_or"),
        ("__ixor__", "bitwise_xor"),
        ("__invert__", "bitwise_not"),
        ("__floordiv__", "floor_divide"),
        ("__rmod__", "remainder"),
        ("__eq__", "eq"),
        ("greater_equal_", "ge"),
        ("__len__", "len"),
        ("__bool__", "bool"),
        ("__neg__", "neg"),
        ("special_expit", "sigmoid"),
        ("special_softmax", "softmax"),
        ("index_add_", "index_add"),
        ("_softmax", "_softmax"),
        ("_threshold", "threshold"),
        ("my_kernel_", "my_kernel"),
        ("____", "____"),
        ("__", "__"),
        ("_", "_"),
    ],
)
def test_spellings_fold(spelling: str, name: str) -> None:
    assert canonical_name(spelling) == name


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(canonical_name(func.__name__))
        return func(*args, **(kwargs or {}))


def test_operators_are_named_as_functions() -> None:
    x = torch.ones(2, 2)
    with _Names() as names:
        y = 1 - x
        y += x
        y = 2**y
        y = 1 / y
        y = y // 1
        y = y % 2
        y = -y @ x
        y = abs(y)
        y = y.unsqueeze(0)[0]
    folded = ["sub", "add", "pow", "reciprocal", "mul", "floor_divide", "remainder", "neg", "matmul", "abs"]
    seen = [name for name in names.seen if name in {*folded, "div"}]
    assert seen in (folded, ["div" if name == "reciprocal" else name for name in folded if name != "mul"])
    assert names.seen[-2:] == ["unsqueeze", "getitem"]


def test_overloads_of_operators_are_folded():
    assert canonical_name("mm.default") == "mm"
    assert canonical_name("add_.Tensor") == "add"
