"""Where a study lives, and what can be wrong with that place before Optuna touches it."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprec.errors import StudyError

SCHEMA_VERSION = 1

_BUSY_TIMEOUT_S = 10.0
_OPTUNA_TABLES = frozenset({"studies", "trials", "version_info", "alembic_version"})


def default_storage(run_dir: Path) -> str:
    """Return the URL of the SQLite study in `run_dir`."""
    return f"sqlite:///{run_dir.resolve() / 'study.db'}"


def check_sqlite(storage: str) -> None:
    """Check that the file of a `sqlite:///` URL is absent, empty, or holds Optuna's tables; it is only read.

    Raises: `StudyError` if it is no database or someone else's, so that nothing is ever written into it.
    """
    path = sqlite_path(storage)
    if path is None or not path.exists() or path.stat().st_size == 0:
        return
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1)
        try:
            tables = {str(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        raise StudyError(f"cannot open study {path}: {error}; {_LOCKED}") from error
    except sqlite3.DatabaseError as error:
        raise StudyError(f"cannot open study {path}: {error}; {_ELSEWHERE}") from error
    if tables and not tables >= _OPTUNA_TABLES:
        shown = ", ".join(sorted(tables)[:5])
        raise StudyError(f"cannot open study {path}: it is a database of something else (tables {shown}); {_ELSEWHERE}")


def sqlite_path(storage: str) -> Path | None:
    """Return the file behind a SQLite URL; None for any other storage and for SQLite in memory."""
    prefix = "sqlite:///"
    if not storage.startswith(prefix) or storage == prefix or ":memory:" in storage:
        return None
    return Path(storage.removeprefix(prefix).partition("?")[0])


def advice(error: BaseException) -> str:
    """Return what to do about an error of the storage."""
    text = str(error).lower()
    if "locked" in text or "busy" in text:
        return _LOCKED
    if "disk" in text and "full" in text:
        return "free some space and give the same command again: finished trials are kept"
    return _ELSEWHERE


def check_not_locked(storage: str, path: Path) -> None:
    """Return if a write could begin: readers get by a lock that would end a run at its first trial."""
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        raise StudyError(f"cannot use study {storage}: {error}; {advice(error)}") from error
    finally:
        connection.close()


def check_identity(stored: Mapping[str, Any], identity: Mapping[str, Any], storage: str, name: str) -> None:
    """Return if a study of ours was stored, of this schema, and about the same as `identity` says.

    Raises: `StudyError` otherwise.
    """
    place = f'study "{name}" in {storage}'
    if "autoprec" not in stored:
        raise StudyError(f"{place} was not made by autoprec; pass another --study NAME or --storage")
    if stored["autoprec"] != SCHEMA_VERSION:
        raise StudyError(
            f"{place} has schema {stored['autoprec']}, and this autoprec reads {SCHEMA_VERSION}; "
            "pass another --study NAME or --run-dir, or use the autoprec that wrote it"
        )
    different = [
        f"{key}: {stored.get(key)!r} then, {value!r} now" for key, value in identity.items() if stored.get(key) != value
    ]
    if different:
        raise StudyError(
            f"cannot resume {place}: it measured something else ({'; '.join(different)}); "
            "pass another --study NAME or --run-dir to start a new one"
        )


def engine_kwargs(storage: str) -> dict[str, Any]:
    """Return what SQLAlchemy needs to know about a storage."""
    if not storage.startswith("sqlite:"):
        return {}
    return {"connect_args": {"timeout": _BUSY_TIMEOUT_S, "factory": _Connection}}


class _Connection(sqlite3.Connection):
    """Commits to a write-ahead log: a trial commits some thirty times, and each would wait for the disk otherwise.

    A killed process loses nothing, a power cut at most the last commits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA synchronous = NORMAL")
        self.execute("PRAGMA journal_mode = WAL")


_LOCKED = "another program holds it: end that program, or pass another --run-dir or --storage"
_ELSEWHERE = "pass another --run-dir or --storage, or move the file away"
