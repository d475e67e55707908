"""The block of loss code: entered again, inside itself and others, and left by an error."""

import pytest
import torch
from torch import nn

from autoprec.policy import Policy, Rule
from autoprec.runtime import apply
from autoprec.runtime.precision import Precision
from autoprec.runtime.running import RUNNING

ONE = torch.ones(1)


def applied(dtype: str) -> Precision:
    return apply(nn.Linear(4, 4), Policy(name=dtype, rules=(Rule(sites="*", format=dtype),), outputs="computed"))


def product() -> torch.dtype:
    return (ONE * 2).dtype


def test_it_may_be_entered_again_and_inside_itself() -> None:
    block = applied("bf16").loss()
    for _ in range(2):
        with block:
            assert product() == torch.bfloat16
            with block:
                assert product() == torch.bfloat16
            assert product() == torch.bfloat16
        assert product() == torch.float32
    assert RUNNING.mode is None


def test_the_innermost_of_several_models_casts() -> None:
    outer, inner = applied("bf16"), applied("fp16")
    with outer.loss():
        with inner.loss():
            assert product() == torch.float16
            with outer.loss():
                assert product() == torch.bfloat16
            assert product() == torch.float16
        assert product() == torch.bfloat16
    assert product() == torch.float32


@pytest.mark.parametrize("is_caught", [True, False])
def test_an_error_ends_it(*, is_caught: bool) -> None:
    def fail(outer: Precision, inner: Precision) -> None:
        with outer.loss():
            try:
                with inner.loss():
                    ONE.item() / 0
            except ZeroDivisionError:
                assert product() == torch.bfloat16
                if not is_caught:
                    raise
            ONE.item() / 0

    with pytest.raises(ZeroDivisionError):
        fail(applied("bf16"), applied("fp16"))
    assert product() == torch.float32
    assert RUNNING.mode is None


def test_an_optimizer_step_inside_is_seen_and_one_after_it_is_not_told() -> None:
    precision = applied("bf16")
    model = precision.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    with precision.loss():
        for _ in range(2):
            before = model(torch.ones(1, 4))
            before.sum().backward()
            optimizer.step()
            assert not torch.equal(model(torch.ones(1, 4)), before)
        mode = RUNNING.mode
    assert mode is not None
    mode.stepped = None  # type: ignore[assignment, method-assign]  # raises where it is told
    optimizer.step()


def test_a_policy_that_casts_nothing_has_none() -> None:
    assert applied("fp32").loss().__enter__() is None
    removed = applied("bf16")
    removed.remove()
    with removed.loss():
        assert product() == torch.float32
