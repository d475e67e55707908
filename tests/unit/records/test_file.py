"""Record files: stable bytes, schema first, newer schemas refused by name."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from autoprec.errors import RecordError
from autoprec.records import SCHEMA_VERSION, dump_record, load_record, save_record
from autoprec.records import file as record_file
from tests.unit.records.samples import RUN


def test_file_and_back_is_the_identity(tmp_path: Path) -> None:
    save_record(RUN, tmp_path / "record.json")
    assert load_record(tmp_path / "record.json") == RUN


def test_no_field_of_the_sample_is_empty() -> None:
    assert all(getattr(RUN, field.name) not in ((), None, {}) for field in fields(RUN))


def test_the_schema_version_comes_first() -> None:
    assert next(iter(json.loads(dump_record(RUN)))) == "schema_version"


def test_the_same_record_has_the_same_bytes_in_another_process() -> None:
    code = (
        "from autoprec.records import dump_record; from tests.unit.records.samples import RUN; "
        "import sys; sys.stdout.write(dump_record(RUN))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout == dump_record(RUN)


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    data = json.loads(dump_record(RUN)) | {"schema_version": SCHEMA_VERSION + 1}
    (tmp_path / "record.json").write_text(json.dumps(data))
    with pytest.raises(RecordError, match=rf"schema {SCHEMA_VERSION + 1}.*upgrade autoprec"):
        load_record(tmp_path / "record.json")


def test_an_older_schema_is_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "record.json").write_text(dump_record(RUN))
    monkeypatch.setattr(record_file, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    monkeypatch.setattr(record_file, "UPGRADES", {SCHEMA_VERSION: lambda data: data | {"name": "upgraded"}})
    assert load_record(tmp_path / "record.json").name == "upgraded"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not JSON"), ("[]", "no schema_version"), ('{"schema_version": "1"}', "no schema_version")],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(RecordError, match=reason):
        load_record(tmp_path / "record.json")


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        load_record(tmp_path / "record.json")


def test_records_import_no_torch() -> None:
    code = "import sys, autoprec.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
