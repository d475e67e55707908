"""What every gate owes: what it proves, what its thresholds mean, a planted fault, and a pass on a healthy run."""

import importlib
from pathlib import Path

import pytest

from autoprec.audit.gate import Gate
from autoprec.audit.gates import GATES
from autoprec.records.audit import AuditRecord
from tests.faults.audit_faults_a import audited_control

ROWS = pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
TABLES = sorted(path.stem for path in (Path(__file__).parents[1] / "faults").glob("audit_faults_*.py"))


@pytest.fixture(scope="module")
def healthy() -> AuditRecord:
    return audited_control("fp16 with a loss scale")


def test_names_are_unique() -> None:
    assert len({gate.name for gate in GATES}) == len(GATES)


@ROWS
def test_it_says_what_it_proves(gate: Gate) -> None:
    assert gate.name.isidentifier()
    assert gate.name == gate.name.lower()
    assert gate.proves[0].islower() or gate.proves.startswith("FP32")
    assert not gate.proves.endswith(".")


@ROWS
def test_its_module_has_its_name(gate: Gate) -> None:
    module = importlib.import_module(f"autoprec.audit.gates.{gate.name}")
    assert getattr(module, gate.name.upper()) is gate
    assert (module.__doc__ or "").startswith(f"`{gate.name}`: ")


@ROWS
def test_its_thresholds_have_a_meaning_and_a_default_that_is_allowed(gate: Gate) -> None:
    for name, row in gate.thresholds.items():
        assert name.isidentifier()
        assert len(row.means) > 10, name
        assert row.minimum <= row.default <= row.maximum, name
        assert not row.whole or float(row.default).is_integer(), name


@ROWS
def test_a_fault_is_planted_for_it(gate: Gate) -> None:
    """Return if one is; `tests/faults` proves that the gate catches it."""
    faults = [fault for table in TABLES for fault in importlib.import_module(f"tests.faults.{table}").FAULTS]
    assert gate.name in {fault.meant_for if hasattr(fault, "meant_for") else fault.gate for fault in faults}


@ROWS
def test_it_passes_or_does_not_apply_to_a_healthy_run_and_says_so_with_a_number(
    gate: Gate, healthy: AuditRecord
) -> None:
    (found,) = (record for record in healthy.gates if record.gate == gate.name)
    assert found.verdict in ("pass", "not-applicable"), found
    assert found.measured
    assert found.advice == ""
    assert found.evidence == ()
    assert found.thresholds.keys() == gate.thresholds.keys()
