"""Record files: JSON, schema version first, the same bytes for the same record."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autoprec.errors import RecordError
from autoprec.files import write_text
from autoprec.records.codec import decode, encode
from autoprec.records.run import SCHEMA_VERSION, RunRecord

# UPGRADES[n] turns the data of schema n into that of schema n + 1; every version ever written stays readable.
UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType({})


def dump_record(record: RunRecord) -> str:
    """Return the JSON text of `record`; equal records give equal bytes."""
    data = {"schema_version": SCHEMA_VERSION, **encode(record)}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def save_record(record: RunRecord, path: Path) -> None:
    """Write `record` to `path`, whole or not at all.

    Raises: `OutputError`.
    """
    write_text(path, dump_record(record))


def load_record(path: Path) -> RunRecord:
    """Return the record in the file `path`, of this or any older schema.

    Raises: `RecordError` if it cannot be read, is no record, or comes from a newer schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read record {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RecordError(
            f"cannot read record {path}: not JSON ({error}); give a record.json that tune wrote"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("schema_version"), int):
        raise RecordError(f"cannot read record {path}: it has no schema_version; give a record.json that tune wrote")
    return decode(RunRecord, _upgraded(data, path), where=str(path))


def _upgraded(data: dict[str, Any], path: Path) -> dict[str, Any]:
    version = data.pop("schema_version")
    if not 1 <= version <= SCHEMA_VERSION:
        raise RecordError(
            f"cannot read record {path}: schema {version}, and this autoprec reads 1 to {SCHEMA_VERSION}; "
            "upgrade autoprec to read it"
        )
    for older in range(version, SCHEMA_VERSION):
        data = UPGRADES[older](data)
    return data
