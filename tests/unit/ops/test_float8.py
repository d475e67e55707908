"""Which shapes FP8 kernels take."""

import pytest

from autoprec.ops import CATALOG, FLOAT8_OPS, float8_fault


def test_the_ops_are_sites_of_the_matmul_family() -> None:
    assert FLOAT8_OPS == ("linear", "matmul", "mm", "addmm")
    assert all(CATALOG[name].family == "matmul" and CATALOG[name].is_site for name in FLOAT8_OPS)


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("linear", [(5, 32), (16, 32), (16,)]),
        ("linear", [(2, 7, 32), (48, 32)]),
        ("linear", [(32,), (16, 32)]),
        ("matmul", [(2, 3, 16), (16, 64)]),
        ("mm", [(1, 16), (16, 16)]),
        ("addmm", [(16,), (3, 32), (32, 16)]),
    ],
)
def test_any_number_of_rows_is_taken(op: str, shapes: list[tuple[int, ...]]) -> None:
    assert float8_fault(op, shapes) == ""


@pytest.mark.parametrize(
    ("op", "shapes", "fault"),
    [
        ("linear", [(5, 32), (10, 32), (10,)], "(5, 32) by (10, 32): 10 not a multiple of 16"),
        ("linear", [(5, 20), (10, 20)], "(5, 20) by (10, 20): 10 and 20 not a multiple of 16"),
        ("addmm", [(3, 32), (3, 24), (24, 32)], "(3, 24) by (24, 32): 24 not a multiple of 16"),
        ("matmul", [(2, 4, 16, 16), (2, 4, 16, 16)], "by (2, 4, 16, 16): the second operand must be a matrix"),
        ("matmul", [(16, 16), (16,)], "by (16,): the second operand must be a matrix"),
    ],
)
def test_what_is_not_taken(op: str, shapes: list[tuple[int, ...]], fault: str) -> None:
    assert fault in float8_fault(op, shapes)
