"""An op that no rule names never fails because its arguments were lowered: every example runs in any mix of formats."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autoprec
from autoprec.policy import Policy, Rule
from tests.contracts.op_examples import EXAMPLES

AS_GIVEN = Policy(
    name="as given",
    rules=(Rule(sites="@loss:mul", format="bf16"), Rule(sites="*", format="as_given")),
    outputs="computed",
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXES = ((BF16,), (BF16, FP32), (FP32, BF16), (FP16,), (FP16, FP32), (FP16, BF16))


class Example(nn.Module):
    """Runs an example whose n-th floating argument has the n-th of some dtypes, the others the last."""

    def forward(self, name: str, dtypes: tuple[torch.dtype, ...]) -> Any:
        left = list(dtypes)

        def t(*shape: int) -> torch.Tensor:
            return torch.full(shape, 0.3).to(left.pop(0) if len(left) > 1 else left[0])

        def i(*shape: int, high: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.long)

        return EXAMPLES[name](t, i)


def fault(model: nn.Module, name: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """Return what torch says against a call, or an empty text."""
    try:
        model(name, dtypes)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.mark.parametrize("dtypes", MIXES, ids=lambda dtypes: "-".join(str(each)[6:] for each in dtypes))
def test_every_example_runs(dtypes: tuple[torch.dtype, ...]) -> None:
    plain, applied = Example(), Example()
    autoprec.apply(applied, AS_GIVEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [name for name in EXAMPLES if not fault(plain, name, (FP32,))]
        faults = {name: found for name in runs if (found := fault(applied, name, dtypes))}
    assert faults == {}
