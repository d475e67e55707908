import gc
import math
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from autoprec.errors import ApplyError, MeasurementError, WorkloadError
from autoprec.measure.traced import trace_policy
from autoprec.measure.training import Training
from autoprec.policy import LossScale, Parameters, Policy, Rule

from .workloads import batches, cross_entropy, mlp, noisy_loss, workload

FP32 = Policy(name="fp32", rules=(Rule(sites="*", format="fp32"),))
BF16 = Policy(name="bf16", rules=(Rule(sites="*", format="bf16"),))


def train(policy=FP32, steps=5, seed=0, nudge=0.0, **fields):
    with Training(workload(**fields), policy, device="cpu", seed=seed, batches=batches(), nudge=nudge) as training:
        return [training.step() for _ in range(steps)]


def test_fp32_equals_a_plain_training_loop_bit_for_bit():
    # Without dropout: what a step draws depends on how it is seeded, and a plain loop is seeded once.
    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    with Training(workload(model=model), FP32, device="cpu", seed=3, batches=batches()) as training:
        start = [parameter.detach().clone() for parameter in training.model.parameters()]
        losses = [training.step() for _ in range(5)]
    plain = model()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), start, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(5):
        optimizer.zero_grad()
        loss = cross_entropy(plain, batches()[step % 3])
        loss.backward()
        optimizer.step()
        assert loss.item() == losses[step]


def test_a_seed_repeats_and_another_seed_differs():
    assert train(loss=noisy_loss) == train(loss=noisy_loss)
    assert train(seed=1)[0] != train(seed=2)[0]


def test_paired_runs_draw_the_same_dropout_although_they_take_turns():
    alone = train()
    with (
        Training(workload(), FP32, device="cpu", seed=0, batches=batches()) as one,
        Training(workload(loss=noisy_loss), BF16, device="cpu", seed=0, batches=batches()) as other,
    ):
        together = []
        for _ in range(5):
            together.append(one.step())
            other.step()
            torch.rand(3)
    assert together == alone


def test_paired_runs_of_two_policies_stay_close():
    # bf16 rounds to 2^-9; the loss of ~1.4 sums a handful of such errors.
    for exact, low in zip(train(FP32), train(BF16), strict=True):
        assert low != exact
        assert low == pytest.approx(exact, abs=0.05)


def test_steps_draw_different_numbers():
    drawn = []

    def loss(model, batch):
        drawn.append(torch.rand(()).item())
        return cross_entropy(model, batch)

    train(loss=loss)
    assert len(set(drawn)) == 5


def test_the_random_states_of_the_caller_survive():
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    train(loss=noisy_loss)
    with pytest.raises(ZeroDivisionError):
        train(loss=lambda model, batch: 1 / 0)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_a_step_that_fails_leaves_no_random_state_behind():
    def loss(model, batch):
        raise ZeroDivisionError

    with Training(workload(loss=loss), FP32, device="cpu", seed=0, batches=batches()) as training:
        before = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            training.step()
        assert torch.equal(torch.get_rng_state(), before)


def test_the_matmul_precision_of_the_caller_survives(monkeypatch):
    seen = []
    fake = Policy(name="reduced", rules=FP32.rules, float32_matmul="bf16")
    state = ["none"]

    def set_it(kind, precision):
        found, state[0] = state[0], precision
        return found

    monkeypatch.setattr("autoprec.measure.training.set_float32_matmul", set_it)
    monkeypatch.setattr("autoprec.measure.training.restore", lambda found: state.__setitem__(0, found))
    monkeypatch.setattr("autoprec.runtime.precision.claim_float32_matmul", set_it)
    monkeypatch.setattr(
        "autoprec.runtime.precision.release_with", lambda owner, found: lambda: state.__setitem__(0, found)
    )

    def loss(model, batch):
        seen.append(state[0])
        return cross_entropy(model, batch)

    training = Training(workload(loss=loss), fake, device="cpu", seed=0, batches=batches())
    assert state == ["none"]
    training.step()
    assert (seen, state) == (["bf16"], ["none"])
    training.close()
    assert state == ["none"]


def test_a_nudge_moves_every_weight_by_its_size_and_repeatably():
    def weights(nudge):
        with Training(workload(), FP32, device="cpu", seed=0, batches=batches(), nudge=nudge) as training:
            return torch.cat([p.detach().flatten() for p in training.model.parameters()])

    relative = weights(1e-3) / weights(0.0) - 1
    # 212 draws of N(0, 1): the standard deviation is known to 1 / sqrt(424) = 5 %, so 20 % is four sigma.
    assert relative.std().item() == pytest.approx(1e-3, rel=0.2)
    assert torch.equal(weights(1e-3), weights(1e-3))
    assert weights(1e-3).dtype == torch.float32


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda model, batch: 1.0, "a float"),
        (lambda model, batch: model(batch[0]), r"a tensor of shape \(16, 4\)"),
        (lambda model, batch: cross_entropy(model, batch).detach(), "does not require grad"),
        (lambda model, batch: model(batch[0]).argmax(), "a tensor of int64"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_named(loss, got):
    with pytest.raises(WorkloadError, match=got):
        train(loss=loss)


def test_no_batches_are_refused():
    with pytest.raises(WorkloadError, match="at least one batch"):
        Training(workload(), FP32, device="cpu", seed=0, batches=[])


def test_a_loss_that_is_not_finite_is_returned_as_it_is():
    assert math.isnan(train(loss=lambda model, batch: cross_entropy(model, batch) * math.nan, steps=1)[0])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_counted(optimizer, fused):
    policy = Policy(name="scaled", rules=FP32.rules, loss_scale=LossScale(kind="dynamic", initial=2.0**24))

    def loss(model, batch):
        # Gradients of the last bias are 2^110 / 4 times the scale, so they overflow while that is 2^20 or more.
        return (model(batch[0]) * 2.0**110).mean()

    fields = {"loss": loss, "optimizer": lambda params: optimizer(params, lr=0.0, fused=fused)}
    with Training(workload(**fields), policy, device="cpu", seed=0, batches=batches()) as training:
        for _ in range(12):
            training.step()
        scale = training.precision.scaler.get_scale()
        assert training.num_skipped == math.log2(2.0**24 / scale)
        assert 5 <= training.num_skipped < 12
        assert training.num_steps == len(training.losses) == 12


def test_without_a_scaler_nothing_is_skipped():
    with Training(workload(), FP32, device="cpu", seed=0, batches=batches()) as training:
        training.step()
        assert training.num_skipped == 0


def test_close_frees_the_model_and_ends_the_run():
    alive = []

    def model():
        made = mlp()
        made.__dict__["root"] = made
        alive.append(weakref.ref(made))
        return made

    gc.collect()
    training = Training(workload(model=model), BF16, device="cpu", seed=0, batches=batches())
    training.step()
    training.close()
    assert alive[0]() is None
    with pytest.raises(MeasurementError, match="closed"):
        training.step()


def test_a_trace_leaves_the_run_as_it_was():
    with Training(workload(loss=noisy_loss), BF16, device="cpu", seed=0, batches=batches()) as training:
        traced = training.trace()
        losses = [training.step(), training.step()]
        training.trace().check()
        losses.append(training.step())
    assert losses == train(BF16, steps=3, loss=noisy_loss)
    assert {row.ran for row in traced.rows} == {("bf16",)}
    assert any(row.site.module == "@loss" for row in traced.rows)


def test_trace_policy_traces_the_first_step():
    traced = trace_policy(workload(), BF16, device="cpu")
    traced.check()
    assert traced.policy is BF16
    assert [str(row.site) for row in traced.rows] == [
        *("0:linear#0", "1:tanh#0", "2:dropout#0", "3:linear#0", "@loss:cross_entropy#0")
    ]


def test_the_optimizer_holds_its_state_as_the_policy_says() -> None:
    pytest.importorskip("torchao")
    policy = Policy(name="p", rules=(Rule(sites="*", format="fp32"),), parameters=Parameters(optimizer_state="8bit"))
    with Training(workload(), policy, device="cpu", seed=0, batches=batches()) as run:
        assert type(run.optimizer).__name__ == "AdamW8bit"


@pytest.mark.parametrize("policy", ["fp32", "autocast-fp16", "bf16-master"])
def test_a_loaded_run_goes_on_bit_for_bit(policy: str) -> None:
    def run() -> Training:
        return Training(workload(), policy, device="cpu", seed=3, batches=batches())

    with run() as whole, run() as first, run() as second:
        expected = [whole.step() for _ in range(5)]
        for _ in range(2):
            first.step()
        second.load_state_dict(first.state_dict())
        assert second.num_steps == 2
        assert [second.step() for _ in range(3)] == expected[2:]
        assert second.num_steps == 5
        for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_under_another_policy_only_model_and_optimizer_are_taken() -> None:
    with (
        Training(workload(), "autocast-fp16", device="cpu", seed=3, batches=batches()) as scaled,
        Training(workload(), "fp32", device="cpu", seed=3, batches=batches()) as plain,
    ):
        scaled.step()
        with pytest.raises(ApplyError, match="computes otherwise"):
            plain.load_state_dict(scaled.state_dict())
        plain.load_state_dict(scaled.state_dict(), other_policy=True)
        assert plain.num_steps == 1
        for one, other in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(one, other)
