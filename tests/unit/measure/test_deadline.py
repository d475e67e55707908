import time

import pytest
import torch

from autoprec.measure import deadline
from autoprec.measure.deadline import StepTooSlow, step_deadline
from autoprec.measure.training import Training

from .workloads import batches, workload


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: now[0])
    return now


class Slow(torch.autograd.Function):
    """Takes its time in the backward pass."""

    now: list[float]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Slow.now[0] += 10
        return grad


def test_a_forward_pass_that_is_too_slow_ends_at_the_next_op(clock):
    reached = []

    def step():
        torch.ones(2).exp()
        clock[0] = 2
        reached.append("slow")
        torch.ones(2).exp()
        reached.append("never")

    with pytest.raises(StepTooSlow, match="step ran 2 s, 1 s were allowed"), step_deadline(1):
        step()
    assert reached == ["slow"]


def test_a_deadline_leaves_autograd_as_it_was(clock):
    """The end of a `no_grad` block is a torch function too; to raise in its place would leave autograd off."""

    def step():
        with torch.no_grad():
            clock[0] = 2
        torch.ones(2).exp()

    with pytest.raises(StepTooSlow), step_deadline(1):
        step()
    assert torch.is_grad_enabled()


def test_a_backward_pass_that_is_too_slow_ends_at_the_next_saved_tensor(clock):
    Slow.now = clock
    w = torch.ones(3, requires_grad=True)
    with step_deadline(1):
        loss = Slow.apply((w * w).exp()).sum()
        with pytest.raises(StepTooSlow):
            loss.backward()
        clock[0] = 0
    assert w.grad is None


def test_backward_after_the_block_is_not_checked(clock):
    w = torch.ones(3, requires_grad=True)
    with step_deadline(1):
        loss = (w * w).exp().sum()
    clock[0] = 100
    loss.backward()
    assert w.grad is not None


def test_a_fast_step_is_bit_for_bit_what_it_was():
    with Training(workload(), "fp32", device="cpu", seed=0, batches=batches()) as plain:
        expected = [plain.step(), plain.step()]
    with Training(workload(), "fp32", device="cpu", seed=0, batches=batches()) as timed:
        with step_deadline(60):
            first = timed.step()
        assert [first, timed.step()] == expected


def test_it_stops_a_training_step_under_a_casting_policy(clock):
    def loss(model, batch):
        clock[0] = 2
        return model(batch[0]).sum()

    with Training(workload(loss=loss), "low-bf16", device="cpu", seed=0, batches=batches()) as training:
        with pytest.raises(StepTooSlow), step_deadline(1):
            training.step()
        assert training.num_steps == 0
        clock[0] = 0
        training.step()


def test_saved_tensors_are_not_kept_alive(clock):
    w = torch.ones(3, requires_grad=True)
    with step_deadline(1):
        y = w.exp()  # exp saves its own output: a hook that returned it as it is would make a cycle
    assert y.grad_fn._raw_saved_result.data.grad_fn is None
    assert time.perf_counter() == 0
