"""Audit files: as record files are, with a schema of their own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import RecordError
from autoprec.records import AUDIT_SCHEMA_VERSION, dump_audit, load_audit, save_audit, save_record
from tests.unit.records.audit_samples import AUDIT, HEALTHY, SKIPPED
from tests.unit.records.samples import RUN


def test_file_and_back_is_the_identity(tmp_path: Path) -> None:
    save_audit(AUDIT, tmp_path / "audit.json")
    assert load_audit(tmp_path / "audit.json") == AUDIT
    assert next(iter(json.loads(dump_audit(AUDIT)))) == "schema_version"


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    data = json.loads(dump_audit(AUDIT)) | {"schema_version": AUDIT_SCHEMA_VERSION + 1}
    (tmp_path / "audit.json").write_text(json.dumps(data))
    with pytest.raises(RecordError, match=rf"schema {AUDIT_SCHEMA_VERSION + 1}.*upgrade autoprec"):
        load_audit(tmp_path / "audit.json")


def test_the_record_of_a_run_is_no_audit(tmp_path: Path) -> None:
    save_record(RUN, tmp_path / "record.json")
    with pytest.raises(RecordError, match="expected AuditRecord"):
        load_audit(tmp_path / "record.json")
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(RecordError, match=r"give an audit\.json that audit wrote"):
        load_audit(tmp_path / "empty.json")


def test_an_audit_passes_unless_a_gate_fails() -> None:
    assert not AUDIT.passed
    assert [gate.gate for gate in AUDIT.failed] == ["match"]
    assert HEALTHY.passed
    assert replace(AUDIT, gates=(SKIPPED,)).passed
