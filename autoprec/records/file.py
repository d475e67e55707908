"""Record files: JSON, schema version first, the same bytes for the same record."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from autoprec.errors import RecordError
from autoprec.files import write_text
from autoprec.records.audit import AUDIT_SCHEMA_VERSION, AuditRecord
from autoprec.records.codec import decode, encode
from autoprec.records.run import SCHEMA_VERSION, RunRecord

Upgrades: TypeAlias = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]
T = TypeVar("T")

# UPGRADES[n] turns the data of schema n into that of schema n + 1; every version ever written stays readable.
UPGRADES: Upgrades = MappingProxyType({})
AUDIT_UPGRADES: Upgrades = MappingProxyType({})


def dump_record(record: RunRecord) -> str:
    """Return the JSON text of `record`; equal records give equal bytes."""
    return _dumped(record, SCHEMA_VERSION)


def save_record(record: RunRecord, path: Path) -> None:
    """Write `record` to `path`, whole or not at all.

    Raises: `OutputError`.
    """
    write_text(path, dump_record(record))


def load_record(path: Path) -> RunRecord:
    """Return the record in the file `path`, of this or any older schema.

    Raises: `RecordError` if it cannot be read, is no record, or comes from a newer schema.
    """
    return _loaded(RunRecord, path, SCHEMA_VERSION, UPGRADES, "a record.json that tune wrote")


def dump_audit(record: AuditRecord) -> str:
    """Return the JSON text of an audit; equal audits give equal bytes."""
    return _dumped(record, AUDIT_SCHEMA_VERSION)


def save_audit(record: AuditRecord, path: Path) -> None:
    """Write an audit to `path`, whole or not at all.

    Raises: `OutputError`.
    """
    write_text(path, dump_audit(record))


def load_audit(path: Path) -> AuditRecord:
    """Return the audit in the file `path`, of this or any older schema.

    Raises: `RecordError` if it cannot be read, is no audit, or comes from a newer schema.
    """
    return _loaded(AuditRecord, path, AUDIT_SCHEMA_VERSION, AUDIT_UPGRADES, "an audit.json that audit wrote")


def _dumped(record: RunRecord | AuditRecord, version: int) -> str:
    data = {"schema_version": version, **encode(record)}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _loaded(kind: type[T], path: Path, version: int, upgrades: Upgrades, wanted: str) -> T:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read record {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RecordError(f"cannot read record {path}: not JSON ({error}); give {wanted}") from error
    if not isinstance(data, dict) or not isinstance(data.get("schema_version"), int):
        raise RecordError(f"cannot read record {path}: it has no schema_version; give {wanted}")
    return decode(kind, _upgraded(data, path, version, upgrades), where=str(path))


def _upgraded(data: dict[str, Any], path: Path, newest: int, upgrades: Upgrades) -> dict[str, Any]:
    version = data.pop("schema_version")
    if not 1 <= version <= newest:
        raise RecordError(
            f"cannot read record {path}: schema {version}, and this autoprec reads 1 to {newest}; "
            "upgrade autoprec to read it"
        )
    for older in range(version, newest):
        data = upgrades[older](data)
    return data
