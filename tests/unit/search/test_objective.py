"""The trial protocol, on a real training run of a millisecond a step."""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.measure import Fidelity, StepTooSlow, Training
from autoprec.policy import Policy, Rule, preset
from autoprec.records.run import TrialRecord
from autoprec.runtime import compilation
from autoprec.search import objective as objective_file
from autoprec.search.objective import Objective, Protocol
from autoprec.search.study import Asked
from tests.unit.search import mlp

BF16 = Policy(name="low", rules=(Rule(sites="*", format="bf16"),))


def protocol(**changes: Any) -> Protocol:
    base = Protocol(
        workload=mlp.workload(),
        device="cpu",
        seed=0,
        batches=tuple(mlp.batches()),
        horizon=24,
        margin=0.01,
        slow_limit=1e6,
    )
    return replace(base, **changes)


def asked(kind: str = "search") -> Asked:
    return Asked(number=3, kind=kind, name="t", choice={"low": "bf16"})  # type: ignore[arg-type]


def measure(objective: Objective, policy: Policy, kind: str = "search", *, stop_at: int | None = None) -> TrialRecord:
    return objective.measure(asked(kind), policy, "key", lambda number, _: number == stop_at)


@pytest.fixture(scope="module")
def fp32() -> Iterator[Objective]:
    objective = Objective(protocol())
    yield objective
    objective.close()


def test_the_fp32_curve_has_the_horizon_and_a_step_time(fp32: Objective) -> None:
    assert len(fp32.losses) == 24
    assert fp32.step_s > 0


def test_fp32_against_itself_loses_nothing(fp32: Objective) -> None:
    record = measure(fp32, preset("fp32", "cpu"), "baseline")
    assert (record.state, record.reason) == ("complete", "")
    assert record.losses == fp32.losses
    assert record.fidelity is not None
    assert record.fidelity.steps_lost_frac == 0
    assert record.is_faithful


def test_a_complete_trial_holds_everything_that_was_measured(fp32: Objective) -> None:
    record = measure(fp32, BF16)
    assert record.state == "complete"
    assert (record.number, record.name, record.key, record.choice) == (3, "t", "key", {"low": "bf16"})
    assert len(record.losses) == record.num_steps == 24
    assert len(record.step_times_s) == len(record.reference_step_times_s) == fp32.protocol.num_rounds
    assert record.speedup is not None
    assert record.speedup.low <= record.speedup.value <= record.speedup.high
    assert record.memory is not None
    assert record.memory.parameter_bytes == 4 * sum(p.numel() for p in mlp.Mlp().parameters())
    assert record.wall_s > 0
    assert set(fp32.chaos.curves) == {"bf16"}


def test_what_rounds_leave_of_the_horizon_comes_first() -> None:
    for horizon in range(8, 250):
        each = protocol(horizon=horizon)
        untimed = horizon - each.num_rounds * each.steps_per_round
        assert 2 <= untimed < 2 + each.steps_per_round
        assert each.num_rounds >= min(12, horizon - 2)


def test_the_pruner_ends_a_trial_but_no_baseline(fp32: Objective) -> None:
    record = measure(fp32, BF16, stop_at=2)
    assert (record.state, record.reason) == ("pruned", "slower than the best trial (Wilcoxon test)")
    assert len(record.step_times_s) == 3
    assert measure(fp32, BF16, "baseline", stop_at=2).state == "complete"


def test_rounds_alternate_who_goes_first(fp32: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[bool] = []
    timed = Objective._timed_step

    def note(self: Objective, run: Training) -> tuple[float, float]:
        order.append(run is fp32._reference)
        return timed(self, run)

    monkeypatch.setattr(Objective, "_timed_step", note)
    measure(fp32, BF16)
    per_round = fp32.protocol.steps_per_round
    assert order[: 4 * per_round] == (
        [False] * per_round + [True] * per_round + [True] * per_round + [False] * per_round
    )


class Slow(mlp.Mlp):
    """Sleeps where it computes in a low format."""

    naps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.dtype != torch.float32:
            for _ in range(50):
                time.sleep(0.05)
                Slow.naps += 1
                hidden = hidden * 1
        y: torch.Tensor = self.last(hidden.float())
        return y


def test_a_step_far_slower_than_fp32_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective_file, "_MIN_DEADLINE_S", 0.1)
    objective = Objective(protocol(workload=mlp.workload(model=Slow), slow_limit=5.0))
    objective.first_step_s = objective.step_s = 0.001
    reported: list[float] = []

    def report(_: int, ratio: float) -> bool:
        reported.append(ratio)
        return False

    record = objective.measure(asked(), BF16, "key", report)
    objective.close()
    assert record.state == "pruned"
    assert record.reason == "over 5x slower than fp32"
    assert Slow.naps < 50
    assert reported == [5.0]


def test_rounds_far_beyond_the_limit_end_a_trial_sooner(fp32: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32, "protocol", replace(fp32.protocol, slow_limit=2.0))
    ends = {
        ratio: next(n for n in range(1, 9) if fp32._is_too_slow([ratio] * n, [1.0] * n)) for ratio in (2.1, 5.9, 6.1)
    }
    assert ends == {2.1: 3, 5.9: 3, 6.1: 2}
    assert not fp32._is_too_slow([1.0, 99.0], [1.0, 1.0]), "one disturbed round ends nothing"


def late(monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """Let the first `times` deadlines be missed; return the limits that were set."""
    limits: list[float] = []

    @contextmanager
    def deadline(seconds: float) -> Iterator[None]:
        limits.append(seconds)
        if len(limits) <= times:
            raise StepTooSlow(seconds, 10.0)
        yield

    monkeypatch.setattr(objective_file, "step_deadline", deadline)
    return limits


def test_a_missed_deadline_is_the_machines_if_fp32_is_as_slow(fp32: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch, 2)
    timed = Objective._timed_step
    monkeypatch.setattr(Objective, "_timed_step", lambda self, run: (timed(self, run)[0], 10.0))
    assert measure(fp32, BF16).state == "complete"


def test_a_missed_deadline_is_the_policys_if_fp32_is_fast(fp32: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = late(monkeypatch, 1)
    monkeypatch.setattr(fp32, "protocol", replace(fp32.protocol, slow_limit=5.0))
    assert measure(fp32, BF16).reason == "over 5x slower than fp32"
    assert len(limits) == 1


def test_fp32_itself_has_no_deadline(fp32: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = late(monkeypatch, 0)
    bar = Asked(number=0, kind="baseline", name="fp32", choice={})
    assert fp32.measure(bar, preset("fp32", "cpu"), "key", lambda *_: False).state == "complete"
    assert limits == []


def test_a_compiled_policy_has_no_deadline_and_its_first_steps_are_told_apart(
    fp32: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = late(monkeypatch, 9)
    monkeypatch.setattr(torch, "compile", lambda call, *, backend: call)
    monkeypatch.setattr(compilation, "compile_fault", lambda kind: None)
    record = measure(fp32, replace(preset("fp32", "cpu"), name="compiled", compile="inductor"))
    assert (record.state, limits) == ("complete", [])
    assert 0 < record.compile_s < record.wall_s
    assert measure(fp32, preset("fp32-channels-last", "cpu")).compile_s == 0.0


def test_a_whole_trial_may_be_settled_by_its_first_step(fp32: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for, drifts = [], []

    def settled(fidelity: Fidelity, train: object, policy: Policy, device: str, *, is_chaotic: Any) -> Fidelity:
        asked_for.append((policy.name, device, train == fp32.protocol.train))
        drifts.append(is_chaotic())
        return replace(fidelity, by_first_step=True)

    monkeypatch.setattr(objective_file, "settled", settled)
    last = preset("fp32-channels-last", "cpu")
    record = measure(fp32, last)
    assert record.fidelity is not None
    assert record.fidelity.by_first_step
    assert asked_for == [("fp32-channels-last", "cpu", True)]
    assert measure(fp32, last, stop_at=2).state == "pruned"
    assert len(asked_for) == 1, "a trial that ended early has no verdict to settle"
    assert drifts == [True], "no convolution: no other kernels"


def test_fp32_by_other_kernels_is_not_ended_where_chaos_drifts_as_far(
    fp32: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective_file, "hopeless", lambda _, losses, *__, **___: len(losses) >= 8)
    assert measure(fp32, preset("fp32-channels-last", "cpu")).state == "complete"
    assert "unfaithful beyond doubt" in measure(fp32, preset("autocast-bf16", "cpu")).reason
    monkeypatch.setattr(objective_file, "drifts_as_chaos", lambda *_: False)
    assert "unfaithful beyond doubt" in measure(fp32, preset("fp32-channels-last", "cpu")).reason


class Broken(mlp.Mlp):
    """Raises where it computes in a low format."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.dtype != torch.float32:
            raise RuntimeError("no kernel for bf16")
        y: torch.Tensor = self.last(hidden)
        return y


def test_what_a_kernel_raises_ends_the_trial_alone() -> None:
    objective = Objective(protocol(workload=mlp.workload(model=Broken)))
    record = measure(objective, BF16)
    assert record.state == "failed"
    assert "test_objective.py" in record.reason
    assert "RuntimeError: no kernel for bf16" in record.reason
    assert measure(objective, preset("fp32", "cpu")).state == "complete"
    objective.close()


class Overflowing(mlp.Mlp):
    """Gives inf where it computes in a low format."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        scale = 1.0 if hidden.dtype == torch.float32 else float("inf")
        y: torch.Tensor = self.last(hidden.float() * scale)
        return y


def test_a_loss_that_is_not_finite_ends_the_trial_as_unfaithful() -> None:
    objective = Objective(protocol(workload=mlp.workload(model=Overflowing)))
    record = measure(objective, BF16)
    objective.close()
    assert (record.state, record.reason) == ("pruned", "unfaithful beyond doubt")
    assert record.fidelity is not None
    assert record.fidelity.verdict == "unfaithful"
    assert record.num_steps < 24


def test_at_most_two_models_are_alive() -> None:
    living: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    alive: list[int] = []

    class Counted(mlp.Mlp):
        def __init__(self) -> None:
            super().__init__()
            living.add(self)
            alive.append(len(living))

    objective = Objective(protocol(workload=mlp.workload(model=Counted), horizon=9))
    for policy in (preset("fp32", "cpu"), BF16, preset("autocast-bf16", "cpu")):
        assert measure(objective, policy).state == "complete"
    objective.close()
    assert max(alive) == 2
