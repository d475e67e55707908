"""Faults of calls that no policy casts, found from the site whose result they read."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autoprec.analysis.downstream import first_not_finite
from autoprec.analysis.low_step import Reference
from tests.unit.analysis.recorded import device_format, referred, site

X = torch.eye(4)


def sinkhorn(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a loss whose targets are made under no_grad from exp(score / 0.05), which fp16 cannot hold."""
    scores = F.linear(x, net.weight)
    with torch.no_grad():
        q = (scores / 0.05).exp()
        q = q / q.sum()
    return -(q * scores.log_softmax(-1)).sum()


def step(scale: float) -> Reference:
    return referred(sinkhorn, X, weight=torch.eye(4) * scale)


def test_the_first_call_that_breaks_is_found_although_no_policy_casts_it() -> None:
    found = first_not_finite(step(0.7), device_format("fp16"), site("linear#0"))  # exp(14) = 1.2e6
    assert found is not None
    assert (str(found.site), found.left_alone, found.is_castable) == (":exp#0", True, False)
    assert "test_downstream.py" in found.source


def test_nothing_is_found_where_nothing_breaks() -> None:
    assert first_not_finite(step(0.4), device_format("fp16"), site("linear#0")) is None  # exp(8) = 2981
    assert first_not_finite(step(0.7), device_format("bf16"), site("linear#0")) is None
    assert first_not_finite(step(0.7), device_format("fp16"), site("log_softmax#0")) is None  # it does not reach exp


def test_a_site_that_breaks_itself_is_found_itself() -> None:
    reference = referred(
        lambda net, x: (x * net.gain).square().mean().sqrt(), torch.full((4,), 300.0), gain=torch.ones(4)
    )
    found = first_not_finite(reference, device_format("fp16"), site("square#0"))
    assert found is not None
    assert found.site == site("square#0")


def test_what_is_not_finite_in_fp32_either_is_no_fault() -> None:
    def masked(net: Any, x: torch.Tensor) -> torch.Tensor:
        scores = (x * net.gain).masked_fill(x == 0, -torch.inf)
        return scores.softmax(-1).square().sum()

    reference = referred(masked, X, gain=torch.ones(4))
    for each in reference.recording.op_graph.sites():
        assert first_not_finite(reference, device_format("fp16"), each) is None


def test_a_step_that_does_not_run_has_no_first_call() -> None:
    try:
        torch.linalg.inv(torch.eye(2, dtype=torch.bfloat16))
        pytest.skip("this torch inverts matrices in bf16")
    except RuntimeError:
        pass
    reference = referred(lambda net, x: torch.linalg.inv(net.matrix).sum(), X, matrix=torch.eye(3) * 2)
    (inverse,) = [each for each in reference.recording.op_graph.sites() if "inv" in each.op]
    assert first_not_finite(reference, device_format("bf16"), inverse) is None


def test_gradients_are_not_computed_on_the_way() -> None:
    reference = step(0.7)
    first_not_finite(reference, device_format("fp16"), site("linear#0"))
    assert all(each.grad is None and each.requires_grad for each in reference.recording.model.parameters())


def test_an_op_without_numerics_of_its_own_is_tried_low_too() -> None:
    def clamped(net: Any, x: torch.Tensor) -> torch.Tensor:
        scores = F.linear(x, net.weight).clamp(max=20.0)
        with torch.no_grad():
            q = (scores / 0.05).exp()
        return -(q / q.sum() * scores.log_softmax(-1)).sum()

    found = first_not_finite(referred(clamped, X, weight=torch.eye(4) * 0.7), device_format("fp16"), site("clamp#0"))
    assert found is not None
    assert str(found.site) == ":exp#0"
