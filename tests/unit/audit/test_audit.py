"""Running gates: what each verdict becomes when gates are off, raise, or cannot be measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.audit.audit import run_gates
from autoprec.audit.audited import Audited
from autoprec.audit.gate import Check, Finding, Gate, Threshold
from autoprec.errors import TraceError, WorkloadError
from autoprec.policy import Policy, Rule, preset
from autoprec.runtime.device import describe
from autoprec.search.observer import Observer
from autoprec.workload import LoadedWorkload
from tests.unit.search import mlp


def audited(**fields: Any) -> Audited:
    loaded = LoadedWorkload(workload=mlp.workload(), name="mlp-small", path=Path("mlp.py"))
    given = {
        "loaded": loaded,
        "policy": preset("fp32", "cpu"),
        "policy_file": None,
        "rule_lines": (),
        "device": describe("cpu"),
        "seed": 2,
        "skip": 2,
    }
    return Audited(**{**given, **fields})


def gate(name: str, check: Check, **thresholds: float) -> Gate:
    rows = {key: Threshold(default=value, unit="", means="") for key, value in thresholds.items()}
    return Gate(name=name, proves="all is well", check=check, thresholds=rows)


def passes(_: Audited, thresholds: Any) -> Finding:
    return Finding(verdict="pass", measured=f"{dict(thresholds)}", notes=("a note",))


def raises(error: Exception) -> Check:
    def check(*_: object) -> Finding:
        raise error

    return check


class Stages(Observer):
    """Collects the stages."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def stage(self, name: str, *, budget_s: float | None = None) -> None:
        self.seen.append(name)


def test_thresholds_differ_from_the_defaults_where_they_are_given() -> None:
    (found,) = run_gates((gate("one", passes, a=1.0, b=2.0),), audited(), {"one": {"b": 3.0}})
    assert found.thresholds == {"a": 1.0, "b": 3.0}
    assert found.measured == "{'a': 1.0, 'b': 3.0}"
    assert found.notes == ("a note",)


def test_a_gate_that_is_off_is_seen_and_not_measured() -> None:
    stages = Stages()
    rows = (gate("one", raises(AssertionError())), gate("two", passes))
    one, two = run_gates(rows, audited(), {}, off={"one": "gates.yaml:7"}, observer=stages)
    assert (one.verdict, one.measured) == ("not-applicable", "turned off on gates.yaml:7")
    assert two.verdict == "pass"
    assert stages.seen == ["two"]


def test_what_cannot_be_measured_has_failed() -> None:
    (found,) = run_gates((gate("one", raises(TraceError("no trace"))),), audited(), {})
    assert (found.verdict, found.measured) == ("fail", "not measured: no trace")
    assert "autoprec policy trace mlp.py:small --policy fp32" in found.advice


def test_what_the_users_code_raises_is_a_failure_of_the_policy() -> None:
    def broken(model: Any, batch: Any) -> Any:
        raise ValueError("odd")

    def check(given: Audited, _: Any) -> Finding:
        with given.train(given.policy, given.batches(1)) as run:
            run.step()
        return Finding(verdict="pass", measured="")

    loaded = replace(audited().loaded, workload=mlp.workload(loss_of=broken))
    (found,) = run_gates((gate("one", check),), audited(loaded=loaded), {})
    assert found.verdict == "fail"
    assert "test_audit.py" in found.measured
    assert "ValueError: odd" in found.measured


def test_a_broken_workload_ends_the_audit() -> None:
    with pytest.raises(WorkloadError, match="broken in fp32"):
        run_gates((gate("one", raises(WorkloadError("broken in fp32"))),), audited(), {})


def test_a_bug_of_ours_is_no_verdict() -> None:
    no_gates: Any = (None,)
    with pytest.raises(AttributeError):
        run_gates((gate("one", lambda given, _: run_gates(no_gates, given, {}) and passes(given, {})),), audited(), {})


def test_a_policy_that_cannot_be_installed_fails_once() -> None:
    elsewhere = Policy(name="x", rules=(Rule(sites="blocks.*:linear", format="bf16"), Rule(sites="*", format="fp32")))
    given = audited(policy=elsewhere)
    assert "matches no module" in given.obstacle

    def check(given: Audited, _: Any) -> Finding:
        given.train(given.policy, given.batches(1))
        raise AssertionError

    def refuses(*_: object) -> Finding:
        return Finding(verdict="fail", measured="wrong model")

    alone, after = (
        run_gates((gate("one", check),), given, {}),
        run_gates((gate("match", refuses), gate("one", check)), given, {}),
    )
    assert [record.verdict for record in alone] == ["fail"]
    assert [record.verdict for record in after] == ["fail", "not-applicable"]
    assert after[1].measured == "not measured: the policy cannot run here, see match"


def test_a_failure_elsewhere_excuses_nothing() -> None:
    def refuses(*_: object) -> Finding:
        return Finding(verdict="fail", measured="slow")

    rows = (gate("speed", refuses), gate("resume", raises(TraceError("another policy's checkpoint"))))
    assert [record.verdict for record in run_gates(rows, audited(), {})] == ["fail", "fail"]


def test_batches_begin_where_the_search_ended() -> None:
    given = audited(skip=6)
    found, every = given.batches(4), list(mlp.batches())
    assert [batch[0].equal(other[0]) for batch, other in zip(found, [*every[6:], *every[:2]], strict=True)] == [
        True
    ] * 4
    assert given.num_unseen(4) == 2
    assert audited(skip=9).num_unseen(4) == 0
