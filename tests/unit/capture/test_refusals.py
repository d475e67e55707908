"""Code that torch functions do not show is refused with its place and what to do."""

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.capture import record
from autoprec.errors import CaptureError, WorkloadError
from tests.unit.capture.steps import Parts, Run, batch, step

_UNSEEN = r"(test_refusals|steps).py:\d+ uses a tensor of shape \(3, 4\) .* no recorded call made .*{}.*plain Python"


class Tagged(torch.Tensor):
    """A subclass of nothing but the name."""


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def traced() -> dict[str, Any]:
    return {"inner": torch.jit.trace(nn.Linear(4, 4), batch())}


def scripted() -> dict[str, Any]:
    return {"inner": torch.jit.script(nn.Linear(4, 4))}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("run", "parts"),
    [
        (lambda m, x: torch.jit.trace(doubled, x)(m.one(x)), dict),
        (lambda m, x: m.inner(m.one(x)), traced),
        (lambda m, x: m.inner(m.one(x)), scripted),
        (lambda m, x: m.one(x).as_subclass(Tagged).sin(), dict),
    ],
)
def test_unseen_code(run: Run, parts: Parts) -> None:
    with pytest.raises(CaptureError, match=_UNSEEN.format("Backward")):
        record(step(run, parts))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_linearize() -> None:
    def run(m: Any, x: torch.Tensor) -> Any:
        return torch.func.linearize(lambda a: m.one(a).sin(), x)[1](x)

    with pytest.raises(CaptureError, match=r"test_refusals.py:\d+ runs while torch traces it.*torch.func.jvp instead"):
        record(step(run))


def test_lazy_modules() -> None:
    with pytest.raises(WorkloadError, match=r"2 uninitialized .* such as 'inner.weight'.*run one through the model"):
        record(step(lambda m, x: m.inner(x), lambda: {"inner": nn.LazyLinear(4)}))
