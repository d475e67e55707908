"""Every planted fault is caught by the gate meant for it, by name; no healthy run is refused by any."""

from pathlib import Path

import pytest

from tests.faults.audit_faults_a import CONTROLS, FAULTS, audited_control
from tests.faults.planted import Fault, run_planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_gate_meant_for_it_catches_it(fault: Fault, tmp_path: Path) -> None:
    found = run_planted(fault.how, tmp_path, only=(fault.gate,))
    (gate,) = found.gates
    assert gate.verdict == "fail", gate
    said = " ".join((gate.measured, *(f"{row.where} {row.what}" for row in gate.evidence)))
    assert fault.says in said
    assert gate.advice


@pytest.mark.parametrize("name", CONTROLS)
def test_no_gate_refuses_a_healthy_run(name: str) -> None:
    found = audited_control(name)
    assert not found.failed, found.failed
