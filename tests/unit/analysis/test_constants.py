import math

import pytest
import torch

from autoprec.analysis.constants import LostConstant, constant_marks, lost_constants
from autoprec.analysis.marks import ReasonCode
from autoprec.graph.opgraph import OpGraph
from autoprec.runtime.dtypes import torch_dtype
from tests.op_graphs import chain, node, tensor

OVERFLOWS, VANISHES, ONE = (
    ReasonCode.CONSTANT_OVERFLOWS,
    ReasonCode.GUARD_VANISHES,
    ReasonCode.BOUND_ROUNDS_TO_ONE,
)
FP32_MAX = torch.finfo(torch.float32).max


def calls(op: str, *constants: float) -> OpGraph:
    return chain(node("a", op, constants=constants))


def lost(op: str, *constants: float, fmt: str = "fp16") -> tuple[LostConstant, ...]:
    return lost_constants(calls(op, *constants), (fmt,))


@pytest.mark.parametrize(
    ("op", "constants", "fmt", "code", "rounded", "replacement"),
    [
        ("where", (-1e9,), "fp16", OVERFLOWS, -math.inf, -65504),
        ("add", (65520.0,), "fp16", OVERFLOWS, math.inf, 65504),
        ("masked_fill", (-1e9,), "fp16", OVERFLOWS, -math.inf, -65504),
        ("where", (-FP32_MAX,), "bf16", OVERFLOWS, -math.inf, -torch.finfo(torch.bfloat16).max),
        ("add", (1e-8,), "fp16", VANISHES, 0, 2.0**-14),
        ("add", (2.0**-25,), "fp16", VANISHES, 0, 2.0**-14),
        ("clamp_min", (1e-12,), "fp16", VANISHES, 0, 2.0**-14),
        ("normalize", (2.0, -1.0, 1e-12), "fp16", VANISHES, 0, 2.0**-14),
        ("cosine_similarity", (-1.0,), "fp16", VANISHES, 0, 2.0**-14),
        ("cosine_similarity", (-1.0, 1e-12), "fp16", VANISHES, 0, 2.0**-14),
        ("clamp", (0.0, 1 - 1e-6), "fp16", ONE, 1, 1 - 2.0**-11),
        ("clamp_max", (0.999,), "bf16", ONE, 1, 1 - 2.0**-8),
    ],
)
def test_a_constant_that_the_format_cannot_hold_is_found(
    op: str, constants: tuple[float, ...], fmt: str, code: ReasonCode, rounded: float, replacement: float
) -> None:
    (found,) = lost(op, *constants, fmt=fmt)
    assert (found.code, found.rounded, found.replacement) == (code, rounded, replacement)


@pytest.mark.parametrize(
    ("op", "constants", "fmt"),
    [
        ("where", (-1e9,), "bf16"),
        ("where", (-math.inf,), "fp16"),
        ("masked_fill", (-65504.0,), "fp16"),
        ("add", (65519.0,), "fp16"),
        ("add", (1e-6,), "fp16"),
        ("add", (1.01 * 2.0**-25,), "fp16"),
        ("add", (1e-8,), "bf16"),
        ("add", (0.0,), "fp16"),
        ("add", (-1e-8,), "fp16"),
        ("mul", (1e-8,), "fp16"),
        ("clamp", (0.0, 1.0), "fp16"),
        ("clamp", (0.99,), "fp16"),
        ("clamp_min", (1 - 1e-6,), "fp16"),
        ("normalize", (1e-4,), "fp16"),
        ("normalize", (1e-12,), "bf16"),
        ("cosine_similarity", (-1.0, 1e-4), "fp16"),
        ("layer_norm", (1e-12,), "fp16"),
        ("sum", (100000,), "fp16"),
    ],
)
def test_a_constant_that_is_held_or_does_not_matter_is_not(op: str, constants: tuple[float, ...], fmt: str) -> None:
    assert lost(op, *constants, fmt=fmt) == ()


def test_a_default_eps_is_told_from_one_that_the_call_names() -> None:
    (default,), (named,) = lost("cosine_similarity"), lost("cosine_similarity", 1e-12)
    assert (default.by_default, default.constant) == (True, 1e-8)
    assert (named.by_default, named.constant) == (False, 1e-12)
    (mark,) = constant_marks([default])
    assert mark.reasons[0].detail.startswith("the default eps of 1e-08 becomes 0 in fp16")


def test_ops_that_compute_on_integers_or_are_left_alone_are_passed_over() -> None:
    integers = (tensor(4, dtype="int64"),)
    nodes = [
        node("a", "add", constants=(1e9,), inputs=integers, outputs=integers),
        node("b", "add", constants=(1e9,), left_alone=True),
    ]
    assert lost_constants(chain(*nodes), ("fp16",)) == ()


@pytest.mark.parametrize("op", ["masked_fill", "clamp_min", "clamp_max", "clamp", "index_fill", "pad"])
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_what_is_said_to_raise_raises(op: str, fmt: str) -> None:
    value = 1e9 if fmt == "fp16" else 3.3999e38  # beyond the format, and not FP32's own limit
    x = torch.zeros(2, dtype=torch_dtype(fmt))
    run = {
        "masked_fill": lambda: x.masked_fill(torch.tensor([True, False]), value),
        "clamp_min": lambda: x.clamp_min(value),
        "clamp_max": lambda: x.clamp_max(value),
        "clamp": lambda: x.clamp(min=value),
        "index_fill": lambda: x.index_fill(0, torch.tensor([0]), value),
        "pad": lambda: torch.nn.functional.pad(x, (1, 1), value=value),
    }[op]
    with pytest.raises(RuntimeError, match="without overflow"):
        run()
    (found,) = lost(op, value, fmt=fmt)
    assert found.raises
    (mark,) = constant_marks([found])
    assert mark.verdict == "must"
    assert mark.reasons[0].detail.endswith(f"and torch refuses it in {op} with an error")


@pytest.mark.parametrize("op", ["where", "add", "sub", "mul"])
def test_what_is_said_not_to_raise_does_not(op: str) -> None:
    x = torch.ones(2, dtype=torch.float16)
    result = {
        "where": lambda: torch.where(torch.tensor([True, False]), x, -1e9)[1:],
        "add": lambda: x + -1e9,
        "sub": lambda: x - 1e9,
        "mul": lambda: x * -1e9,
    }[op]()
    assert (result == -math.inf).all()
    assert not lost(op, -1e9)[0].raises


def test_the_limit_of_fp32_is_never_a_fault_by_itself() -> None:
    """`masked_fill(mask, torch.finfo(x.dtype).min)` asks a low tensor for another number."""
    (found,) = lost("masked_fill", -FP32_MAX)
    assert not found.raises
    (mark,) = constant_marks([found])
    assert mark.verdict == "prefer"
    assert "fine if written as finfo(x.dtype)" in mark.reasons[0].detail


def test_a_lost_constant_is_no_fault_by_itself_and_its_reason_says_nothing_but_that() -> None:
    (mark,) = constant_marks(lost("add", 1e-8))
    assert mark.verdict == "prefer"
    assert mark.reasons[0].detail == "1e-08 becomes 0 in fp16"


def test_two_calls_of_a_site_make_one_mark() -> None:
    found = lost_constants(
        chain(node("a", "add", constants=(1e-8,)), node("b", "add", call=1, constants=(1e-8,))), ("fp16",)
    )
    (mark,) = constant_marks(found)
    assert (mark.verdict, mark.reasons[0].evidence["num_calls"]) == ("prefer", 2)


def test_a_bound_is_told_by_its_distance_from_one() -> None:
    (mark,) = constant_marks(lost("clamp", 1 - 1e-6))
    assert mark.reasons[0].detail.startswith("the bound 1 - 1e-06 becomes 1 in fp16")


def test_infinity_in_evidence_is_text_as_json_has_none() -> None:
    (mark,) = constant_marks(lost("where", -1e9))
    assert mark.reasons[0].evidence["rounded"] == "-inf"
