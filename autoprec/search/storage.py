"""Where a study lives, and what can be wrong with that place before Optuna touches it."""

import sqlite3
from pathlib import Path

from autoprec.errors import StudyError

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


_LOCKED = "another program holds it: end that program, or pass another --run-dir or --storage"
_ELSEWHERE = "pass another --run-dir or --storage, or move the file away"
