"""The gates one by one, on runs made by hand: what is held against which threshold, and what is advised."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate
from autoprec.audit.gates.capable import CAPABLE
from autoprec.audit.gates.cost import COST
from autoprec.audit.gates.fidelity import FIDELITY, paired_run
from autoprec.audit.gates.honoured import HONOURED
from autoprec.audit.gates.match import MATCH
from autoprec.audit.gates.memory import MEMORY
from autoprec.audit.gates.speed import SPEED
from autoprec.audit.paired import Paired
from autoprec.errors import TraceError
from autoprec.measure import Energy, MemoryUse, Training
from autoprec.measure.step_time import MIN_ROUNDS
from autoprec.policy import Policy, Rule, preset
from autoprec.search.objective import Protocol
from autoprec.search.prove import Curve
from tests.unit.audit.test_audit import audited
from tests.unit.search import mlp

BYTES = MemoryUse(total_bytes=400, saved_bytes=100, parameter_bytes=100, gradient_bytes=100, optimizer_bytes=100)
FALLING = tuple(2.0 * 0.97**step for step in range(24))


def paired(**fields: Any) -> Paired:
    """Return a pair whose policy takes half the time of FP32, give or take nothing."""
    curve = Curve(losses=FALLING, evaluate_before=None, evaluate_after=None)
    given: dict[str, Any] = {
        "protocol": Protocol(
            workload=mlp.workload(), device="cpu", seed=2, batches=[0] * 4, horizon=24, margin=0.01, slow_limit=20.0
        ),
        "policy": preset("fp32", "cpu"),
        "reference": curve,
        "candidate": curve,
        "times_s": {"fp32": (0.2,) * 12, "policy": (0.1,) * 12},
        "energy": None,
        "memory": {"fp32": BYTES, "policy": BYTES},
        "num_samples": 8,
    }
    return Paired(**{**given, **fields})


def times(*ratios: float) -> dict[str, tuple[float, ...]]:
    return {"fp32": (1.0,) * len(ratios), "policy": tuple(1 / ratio for ratio in ratios)}


def check(gate: Gate, pair: Paired | None = None, given: Audited | None = None, **thresholds: float) -> Finding:
    subject = given or audited()
    if pair is not None:
        subject.__dict__["paired"] = pair
    return gate.check(subject, {**gate.defaults, **thresholds})


def test_a_speed_that_was_agreed() -> None:
    found = check(SPEED, paired(), min_speedup=1.9)
    assert (found.verdict, found.value, found.threshold) == ("pass", 2.0, 1.9)
    assert found.measured == "2.00x fp32 (2.00 to 2.00 in 12 rounds), 100 ms a step beside 200 ms"


@pytest.mark.parametrize(
    ("ratios", "least", "verdict"),
    [
        ((0.95, 1.02) * 6, 1.0, "pass"),  # a tie
        ((0.95,) * 12, 1.0, "fail"),  # slower beyond the spread
        ((0.5,) * 8 + (1.1,) * 4, 1.0, "fail"),  # the spread holds 1, and the median is far from it
        ((1.1, 1.4) * 6, 1.2, "fail"),  # the lower bound counts where more than a tie was agreed
        ((1.1, 1.4) * 6, 1.1, "pass"),
        ((1.2,) * 4, 1.0, "fail"),  # four rounds bound nothing
    ],
)
def test_the_lower_bound_and_ties(ratios: tuple[float, ...], least: float, verdict: str) -> None:
    found = check(SPEED, paired(times_s=times(*ratios)), min_speedup=least)
    assert found.verdict == verdict
    assert bool(found.advice) is (verdict == "fail")


def test_what_was_not_timed() -> None:
    emulated = check(SPEED, paired(times_s={}, emulated=("fp8_e4m3",)))
    assert emulated.verdict == "not-applicable"
    assert "fp8_e4m3 is emulated" in emulated.measured
    assert check(SPEED, paired(times_s=times(1.0, 1.0), stopped="unfaithful")).verdict == "not-applicable"
    slow = check(SPEED, paired(times_s={"fp32": (), "policy": ()}, stopped="over 20 times"))
    assert (slow.verdict, slow.measured) == ("fail", "not timed: over 20 times")


def test_memory_names_what_grew() -> None:
    grown = replace(BYTES, total_bytes=800, saved_bytes=400, optimizer_bytes=200, parameter_bytes=50)
    found = check(MEMORY, paired(memory={"fp32": BYTES, "policy": grown}), max_ratio=1.5)
    assert (found.verdict, found.value, found.threshold) == ("fail", 2.0, 1.5)
    assert [row.where for row in found.evidence] == ["kept for the backward pass", "optimizer state"]
    assert "max_ratio under memory in gates.yaml" in found.advice
    assert check(MEMORY, paired(memory={"fp32": BYTES, "policy": grown}), max_ratio=2.0).verdict == "pass"
    assert check(MEMORY, paired(memory={}, stopped="slow")).verdict == "not-applicable"


def test_cost_is_price_times_time_over_samples() -> None:
    found = check(COST, paired(energy=Energy(reference_j=9.0, candidate_j=4.0)), audited(price_per_hour=3.6))
    # 3.6 an hour is 0.001 a second: 0.1 s for 8 samples are 12.5 for a million, and twice that in FP32
    assert found.measured.startswith("12.5 per million samples (12.5 to 12.5), 25 in fp32, at 3.6 an hour")
    assert "4 J a step, 9 J in fp32" in found.measured
    assert (found.verdict, found.value) == ("pass", 0.5)
    assert check(COST, paired(), audited(price_per_hour=1.0), max_ratio=0.4).verdict == "fail"
    assert check(COST, paired(times_s=times(*(0.5,) * 12)), audited(price_per_hour=1.0)).verdict == "fail"


def test_what_is_just_allowed_passes() -> None:
    assert check(COST, paired(), audited(price_per_hour=1.0), max_ratio=0.5).verdict == "pass"
    assert check(SPEED, paired(times_s=times(*(2.0,) * MIN_ROUNDS)), min_speedup=1.5).verdict == "pass"


def test_cost_without_a_price_or_a_clock() -> None:
    energy = Energy(reference_j=9.0, candidate_j=4.0)
    found = check(COST, paired(energy=energy))
    assert (found.verdict, found.notes) == ("not-applicable", ("4 J a step, 9 J in fp32",))
    assert check(COST, paired(times_s=times(1.0)), audited(price_per_hour=1.0)).measured == "not timed: too few rounds"


def test_a_comparison_that_cannot_tell_fails_with_the_advice_to_train_longer() -> None:
    noise = torch.randn(24, generator=torch.Generator().manual_seed(0)).mul(0.02).tolist()
    noisy = tuple(loss + off for loss, off in zip(FALLING, noise, strict=True))
    found = check(FIDELITY, paired(candidate=Curve(losses=noisy, evaluate_before=None, evaluate_after=None)))
    assert found.verdict == "fail"
    assert "inconclusive" in found.measured
    assert found.advice == "train longer: write {horizon: 96} under fidelity in gates.yaml and audit again"


def test_curves_that_were_gone_on_with_are_told_so_whatever_the_verdict() -> None:
    found = check(FIDELITY, paired(undecided="inconclusive: between 0% and 3%"))
    assert found.verdict == "pass"
    (note,) = found.notes
    assert note == (
        "the same curves were gone on with, to 24 steps, as they could not tell before (inconclusive: between 0% and "
        "3%)"
    )


def test_how_long_a_pair_may_train_comes_from_the_gates_file_and_only_if_it_is_judged() -> None:
    assert paired_run({}, is_judged=True) == {"horizon": 100, "margin": 0.01, "longest": 4}
    given = {"horizon": 60.0, "longest": 2.0, "margin": 0.02}
    assert paired_run(given, is_judged=True) == {"horizon": 60, "margin": 0.02, "longest": 2}
    assert paired_run(given, is_judged=False) == {"horizon": 60, "margin": 0.02, "longest": 1}


def test_an_evaluate_that_got_worse_fails_whatever_the_curve_says() -> None:
    better = Curve(losses=FALLING, evaluate_before=2.0, evaluate_after=1.0)
    worse = Curve(losses=FALLING, evaluate_before=None, evaluate_after=1.2)
    found = check(FIDELITY, paired(reference=better, candidate=worse))
    assert found.verdict == "fail"
    assert found.evidence[1].where == "evaluate"
    assert check(FIDELITY, paired(reference=better, candidate=replace(worse, evaluate_after=1.05))).verdict == "pass"


def test_batches_that_tuning_has_seen_are_told() -> None:
    found = check(FIDELITY, paired(), audited(skip=6))
    assert found.verdict == "pass"
    assert found.notes == ("2 of 4 batches are new: the workload has no more that tuning has not seen",)
    assert check(FIDELITY, paired(), audited(skip=6), unseen_batches=2).verdict == "pass"
    refused = check(FIDELITY, paired(), audited(skip=6), unseen_batches=3)
    assert (refused.verdict, refused.value, refused.threshold) == ("fail", 2, 3)


def test_a_step_that_cannot_be_traced_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(run: Training) -> None:
        raise TraceError("module head is compiled")

    monkeypatch.setattr(Training, "trace", trace)
    found = check(HONOURED)
    assert (found.verdict, found.measured) == (
        "not-applicable",
        "the step cannot be traced: module head is compiled",
    )


def test_a_policy_without_a_lock_is_held_to_what_it_says() -> None:
    silent = check(MATCH, given=audited(policy=Policy(name="x", rules=(Rule(sites="*", format="fp32"),))))
    assert silent.verdict == "pass"
    assert silent.notes[0].startswith("the policy has no lock: nothing says what it is for")
    old = replace(
        preset("fp32", "cpu"), evidence={"graph": "aa", "versions": {"torch": "1.0"}}, device={"kind": "cuda"}
    )
    found = check(MATCH, given=audited(policy=old))
    assert {row.where for row in found.evidence} == {"graph", "torch", "device kind"}
    assert "it says graph, device, torch of what it was tuned for" in found.notes[0]
    loose = check(MATCH, given=audited(policy=old), architecture=0, device=0, torch=0)
    assert (loose.verdict, len(loose.notes)) == ("pass", 4)


def test_rules_of_a_file_are_told_with_their_line(tmp_path: Path) -> None:
    rules = (Rule(sites="*:softmax", format="fp32"), Rule(sites="*", format="fp32"))
    given = audited(policy=Policy(name="x", rules=rules), policy_file=tmp_path / "p.yaml", rule_lines=(7, 8))
    found = check(MATCH, given=given)
    assert found.evidence[0].where == f"{tmp_path}/p.yaml:7"
    assert found.advice.startswith("mend the rules, then see: autoprec policy check")
    assert check(MATCH, given=audited(policy=Policy(name="x", rules=rules))).verdict == "pass", "a preset"


def test_formats_and_precisions_that_the_device_lacks() -> None:
    device = replace(audited().device, formats=("fp32", "bf16"), native_formats=("fp32",))
    rules = (Rule(sites="*:linear", format="bf16"), Rule(sites="*:gelu", format="fp16"), Rule(sites="*", format="fp32"))
    found = check(CAPABLE, given=audited(device=device, policy=Policy(name="x", rules=rules)))
    assert [(row.where, row.what.split(",")[0]) for row in found.evidence] == [
        ("bf16 at 2 sites", "runs in software"),
        ("fp16 at 1 site", "does not run here at all"),
    ]
    assert (
        check(CAPABLE, given=audited(device=device, policy=Policy(name="x", rules=rules)), max_lacking=2).verdict
        == "pass"
    )
