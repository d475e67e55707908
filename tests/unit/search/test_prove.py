"""The proof: a second training on other batches, another seed and a longer horizon."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import TraceError
from autoprec.measure import Fidelity, Training
from autoprec.policy import Policy, preset
from autoprec.search import prove
from autoprec.search.prove import Curve, Prover, evaluate_missed
from tests.unit.search import mlp
from tests.unit.search.test_objective import BF16, Broken, Overflowing, protocol


def prover(**changes: object) -> Prover:
    return Prover(protocol(horizon=12, **changes), tuple(mlp.batches())[4:])


def test_the_proof_is_longer_and_on_another_seed_and_other_batches() -> None:
    proof = prover()
    assert (proof.protocol.horizon, proof.protocol.seed) == (24, 1)
    assert (
        proof.reference.losses
        != Prover(replace(protocol(horizon=12), seed=5), tuple(mlp.batches())[4:]).reference.losses
    )


def test_fp32_proves_itself_and_the_reference_is_trained_once() -> None:
    proof = prover()
    check = proof.prove("fp32", preset("fp32", "cpu"), chaotic=False)
    assert check.passed
    assert check.losses == check.reference_losses
    assert proof.reference is proof.reference


@pytest.mark.parametrize(("model", "reason"), [(Broken, "no kernel for bf16"), (Overflowing, "loss is")])
def test_what_breaks_is_not_proven(model: type[nn.Module], reason: str) -> None:
    check = prover(workload=mlp.workload(model=model)).prove("low", BF16, chaotic=False)
    assert not check.passed
    assert reason in check.reason


def test_evaluate_is_compared_and_the_training_mode_comes_back() -> None:
    class Watched(mlp.Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append(self.training)
            return super().forward(x)

    modes: list[bool] = []
    check = prover(workload=mlp.workload(model=Watched, with_evaluate=True)).prove("low", BF16, chaotic=True)
    assert check.evaluate_reference is not None
    assert check.evaluate_candidate == pytest.approx(check.evaluate_reference, rel=0.05)
    # of each run: eight evaluations before, 24 steps of training, eight evaluations after; one step more is traced
    expected = [False] * 8 + [True] * 24 + [False] * 8
    assert [mode for mode in modes if mode].count(True) % 24 == 1
    assert modes[:40] == expected


@pytest.mark.parametrize(
    ("after", "missed"), [(0.5, False), (0.54, False), (0.2, False), (0.56, True), (math.nan, True), (math.inf, True)]
)
def test_evaluate_may_miss_a_tenth_of_what_training_gained(after: float, missed: bool) -> None:
    reference = Curve(losses=(), evaluate_before=1.0, evaluate_after=0.5)
    candidate = Curve(losses=(), evaluate_before=1.0, evaluate_after=after)
    assert bool(evaluate_missed(reference, candidate)) == missed


def test_without_evaluate_nothing_is_missed() -> None:
    curve = Curve(losses=(), evaluate_before=None, evaluate_after=None)
    assert evaluate_missed(curve, curve) == ""


def test_two_policies_are_timed_side_by_side() -> None:
    ratio = prover().versus(preset("fp32", "cpu"), preset("fp32", "cpu"), max_s=20)
    assert 0 < ratio.low <= ratio.value <= ratio.high < math.inf


def test_a_policy_that_the_kernels_do_not_honor_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.runtime.cast_mode.CastMode.cast", lambda mode, value, dtype: value)
    check = prover().prove("low", BF16, chaotic=False)
    assert not check.passed
    assert "not honored" in check.reason
    assert "its arguments were not cast: they came in as fp32" in check.reason
    assert check.losses == ()


def test_what_cannot_be_traced_is_judged_by_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    def untraceable(_: Training) -> None:
        raise TraceError("trace: module extra is compiled")

    monkeypatch.setattr(Training, "trace", untraceable)
    assert prover().prove("fp32", preset("fp32", "cpu"), chaotic=False).passed


def test_a_proof_may_be_settled_by_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(fidelity: Fidelity, train: object, policy: Policy, device: str, *, is_chaotic: Any) -> Fidelity:
        assert (policy.name, device, is_chaotic()) == ("fp32-channels-last", "cpu", True)
        return replace(fidelity, verdict="inconclusive", reason="seen", by_first_step=True)

    monkeypatch.setattr(prove, "settled", settled)
    check = prover().prove("last", preset("fp32-channels-last", "cpu"), chaotic=False)
    assert (check.passed, check.reason) == (False, "seen")
    assert check.fidelity is not None
    assert check.fidelity.by_first_step


def test_fp32_by_other_kernels_is_trained_to_the_end_where_chaos_drifts_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "hopeless", lambda *_, **__: True)
    last, low = preset("fp32-channels-last", "cpu"), preset("autocast-bf16", "cpu")
    ours = prover()
    assert len(ours.prove("last", last, chaotic=False).losses) == ours.protocol.horizon
    assert len(ours.prove("low", low, chaotic=False).losses) < ours.protocol.horizon
    monkeypatch.setattr(prove, "drifts_as_chaos", lambda *_: False)
    assert len(ours.prove("last", last, chaotic=False).losses) < ours.protocol.horizon
