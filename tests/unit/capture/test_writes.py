"""Calls that write to an argument compute in its dtype: no policy casts them, and the op graph says so."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.capture import record
from tests.unit.capture.steps import Run, check_faithful, step


def with_out(m: Any, x: torch.Tensor) -> Any:
    result = torch.empty_like(x)
    torch.mul(x, 2, out=result)
    return m.one(result)


@pytest.mark.parametrize(
    ("op", "run"),
    [
        ("mul", lambda m, x: m.one(x).mul_(2)),
        ("mul", with_out),
        ("relu", lambda m, x: F.relu(m.one(x), True)),
        ("relu", lambda m, x: nn.ReLU(inplace=True)(m.one(x))),
        ("dropout", lambda m, x: F.dropout(m.one(x), 0.5, True, True)),
        ("index_copy", lambda m, x: m.one(x).index_copy_(0, torch.tensor([1]), x[:1])),
    ],
)
def test_calls_that_write_to_an_argument_cannot_be_cast(op: str, run: Run) -> None:
    graph = check_faithful(step(run)).op_graph
    assert [node.is_castable for node in graph if node.op == op] == [False]
    assert [node.is_castable for node in graph if node.op == "linear"] == [True]


@pytest.mark.parametrize(
    "run", [lambda m, x: F.relu(m.one(x), False), lambda m, x: torch.mul(m.one(x), 2, out=None), lambda m, x: m.one(x)]
)
def test_other_calls_can_be_cast(run: Run) -> None:
    assert all(node.is_castable for node in record(step(run)).op_graph)


def test_a_write_in_inference_mode() -> None:
    def run(m: Any, x: torch.Tensor) -> Any:
        with torch.inference_mode():
            target = m.two(x)
            target[0] = 1
            target.mul_(2)
        return m.one(x) * target.clone()

    check_faithful(step(run))
