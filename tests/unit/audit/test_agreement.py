"""Two audits of one policy: the gate `repeat` says whether they agree, or why they are not compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.audit.agreement import held_against_former
from autoprec.records import AuditRecord, save_audit
from autoprec.records.audit import GateRecord
from tests.unit.records.audit_samples import AUDIT, PASSED, SKIPPED

REPEAT = replace(PASSED, gate="repeat", measured="two runs are equal", value=0.0)
SPEED = replace(PASSED, gate="speed")


def audit(*gates: GateRecord, **fields: Any) -> AuditRecord:
    return replace(AUDIT, gates=(*gates, REPEAT), **fields)


def held(found: AuditRecord, former: AuditRecord | None, folder: Path) -> GateRecord:
    if former is not None:
        save_audit(former, folder / "audit.json")
    *others, repeat = held_against_former(found, folder / "audit.json").gates
    assert tuple(others) == found.gates[:-1]
    return repeat


def test_a_first_audit_is_held_against_nothing(tmp_path: Path) -> None:
    assert held(audit(SPEED), None, tmp_path) == REPEAT


def test_the_same_verdicts_agree(tmp_path: Path) -> None:
    found = held(audit(SPEED, SKIPPED), audit(replace(SPEED, value=1.3), SKIPPED), tmp_path)
    assert found.verdict == "pass"
    assert "came to the same verdicts (2 gates compared)" in found.measured


def test_another_verdict_is_named_and_fails(tmp_path: Path) -> None:
    now = replace(SPEED, verdict="fail", measured="0.95x fp32")
    found = held(audit(now, SKIPPED), audit(SPEED, SKIPPED), tmp_path)
    assert found.verdict == "fail"
    assert [row.where for row in found.evidence] == ["speed"]
    assert "pass before (1.40x fp32), fail now (0.95x fp32)" in found.evidence[0].what
    assert "autoprec audit run.py --policy policy.yaml" in found.advice


def test_other_thresholds_and_new_gates_say_nothing(tmp_path: Path) -> None:
    now = replace(SPEED, verdict="fail", thresholds={"torch": 3.0})
    found = held(audit(now, replace(SKIPPED, gate="new")), audit(SPEED), tmp_path)
    assert found.verdict == "pass"
    assert "(0 gates compared)" in found.measured


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"policy": "autoprec: 1\nname: other\n"}, "policy"),
        ({"workload": "other.py"}, "workload"),
        ({"device": replace(AUDIT.device, name="Other")}, "device"),
        ({"versions": {"torch": "2.12.0"}}, "versions"),
    ],
)
def test_an_audit_of_something_else_is_not_compared(fields: dict[str, Any], name: str, tmp_path: Path) -> None:
    found = held(audit(replace(SPEED, verdict="fail")), audit(SPEED, **fields), tmp_path)
    assert found.verdict == "pass"
    assert found.notes[-1] == f"the former audit is not compared: it had another {name}"


def test_an_unreadable_one_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("{")
    found = held(audit(SPEED), None, tmp_path)
    assert found.verdict == "pass"
    assert "the former audit is not compared" in found.notes[-1]


def test_without_the_gate_nothing_is_said(tmp_path: Path) -> None:
    save_audit(audit(SPEED), tmp_path / "audit.json")
    found = replace(AUDIT, gates=(replace(SPEED, verdict="fail"),))
    assert held_against_former(found, tmp_path / "audit.json") == found
