"""FP32 and a policy side by side: paired curves, times, memory, energy, and where it ends early."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoprec.audit import paired as module
from autoprec.audit.paired import num_samples, train_paired
from autoprec.errors import WorkloadError
from autoprec.measure import Energy, StepTooSlow
from autoprec.policy import LossScale, Policy, Rule, preset
from autoprec.runtime import compilation
from tests.unit.search import mlp

FP32 = preset("fp32", "cpu")


def run(policy: Policy = FP32, *, horizon: int = 18, **fields: Any) -> module.Paired:
    return train_paired(mlp.workload(**fields), policy, "cpu", 5, list(mlp.batches()), horizon)


def test_fp32_beside_itself() -> None:
    found = run(with_evaluate=True)
    assert found.reference == found.candidate
    assert len(found.candidate.losses) == 18
    assert [len(times) for times in found.times_s.values()] == [8, 8]  # two of 18 steps are not timed
    assert found.memory["fp32"] == found.memory["policy"]
    assert found.energy is None
    assert found.num_samples == 16
    assert found.fidelity(0.01).verdict == "faithful"
    assert (found.missed, found.stopped, found.emulated) == ("", "", ())
    assert found.speedup is not None
    assert found.candidate.evaluate_after is not None


def test_the_order_within_rounds_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = module._Side._step

    def step(side: Any, name: str) -> float:
        order.append(name)
        return original(side, name)

    monkeypatch.setattr(module._Side, "_step", step)
    run(horizon=8)
    turns = [name for name, _ in itertools.groupby(order[4:])]
    assert turns == ["fp32", "policy", "fp32", "policy"]  # the runs of two rounds that meet are one group


@pytest.mark.parametrize(("longest", "length"), [(1, 12), (3, 36)])
def test_curves_that_cannot_tell_are_gone_on_with_and_not_begun_anew(
    longest: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[float, ...], ...]] = []
    verdict = run().fidelity(0.01)

    def compared(*curves: tuple[float, ...], **_: Any) -> Any:
        asked.append(curves)
        return replace(verdict, verdict="inconclusive", reason="inconclusive: who knows")

    monkeypatch.setattr(module, "compare", compared)
    found = train_paired(mlp.workload(), FP32, "cpu", 5, list(mlp.batches()), 12, longest=longest)
    assert len(found.candidate.losses) == len(found.reference.losses) == length
    assert found.protocol.horizon == length
    assert found.undecided == ("" if longest == 1 else "inconclusive: who knows")
    if longest > 1:
        assert [len(curve) for curve in asked[0]] == [12, 12]
        assert found.candidate.losses[:12] == asked[0][1]
        assert len(found.times_s["policy"]) == 17  # rounds of two steps, but for the two that warm up


def test_curves_that_can_tell_or_have_no_hope_are_not_gone_on_with() -> None:
    found = train_paired(mlp.workload(), FP32, "cpu", 5, list(mlp.batches()), 12, longest=3)
    assert (len(found.candidate.losses), found.undecided) == (12, "")
    short = train_paired(mlp.workload(), FP32, "cpu", 5, list(mlp.batches()), 4, longest=3)
    assert (len(short.candidate.losses), short.undecided) == (4, "")


def test_a_run_that_is_lost_while_it_is_gone_on_with_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Side, "_undecided", lambda side: "inconclusive")
    lost = iter(["", *[""] * 4, *["unfaithful beyond doubt"] * 9])
    monkeypatch.setattr(module._Side, "_hopeless", lambda side: next(lost))
    found = train_paired(mlp.workload(), FP32, "cpu", 5, list(mlp.batches()), 12, longest=3)
    assert found.stopped == "unfaithful beyond doubt"
    assert found.undecided == "inconclusive"
    assert 12 < len(found.candidate.losses) < 36
    assert found.memory == {}


def test_what_has_no_hope_is_not_trained_to_the_end() -> None:
    def explodes(model: Any, batch: Any) -> Any:
        return mlp.loss(model, batch) + (model(batch[0]) * 1e5).square().mean() * 1e-12

    every = Policy(name="low", rules=(Rule(sites="*", format="fp16"),), loss_scale=LossScale())
    found = run(every, horizon=40, loss_of=explodes)
    assert found.stopped == "unfaithful beyond doubt after 4 steps"
    assert found.memory == {}
    assert not math.isfinite(found.fidelity(0.01).steps_lost_frac)


def test_no_deadline_watches_a_policy_that_compiles_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def deadline(seconds: float) -> Any:
        raise StepTooSlow(seconds, 10.0)

    monkeypatch.setattr(module, "step_deadline", deadline)
    monkeypatch.setattr(torch, "compile", lambda call, *, backend: call)
    monkeypatch.setattr(compilation, "compile_fault", lambda kind: None)
    found = run(replace(FP32, name="compiled", compile="inductor"), horizon=8)
    assert (found.stopped, len(found.candidate.losses)) == ("", 8)


def test_a_step_past_its_deadline_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def deadline(seconds: float) -> Any:
        raise StepTooSlow(seconds, 9.0)

    monkeypatch.setattr(module, "step_deadline", deadline)
    found = run()
    assert found.stopped == "a step takes over 20 times as long as one of fp32"
    assert found.speedup is None


def test_fp32_that_is_broken_is_told() -> None:
    def loss(model: Any, batch: Any) -> Any:
        loss.calls += 1
        return mlp.loss(model, batch) * (math.nan if loss.calls > 5 else 1.0)

    loss.calls = 0
    with pytest.raises(WorkloadError, match=r"the loss of fp32 is nan at step 4: the workload is broken"):
        run(loss_of=loss)


def test_energy_is_that_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    joules = itertools.count(step=6)
    monkeypatch.setattr(module, "energy_meter", lambda device: lambda: next(joules))
    assert run().energy == Energy(reference_j=3.0, candidate_j=3.0)


def test_samples_of_a_batch() -> None:
    assert num_samples((torch.tensor(1.0), {"x": torch.zeros(7, 3)})) == 7
    assert num_samples("text") == 1
