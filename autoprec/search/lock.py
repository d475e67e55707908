"""One tune at a time in a run folder: an advisory lock that the system releases when its process dies."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoprec.errors import StudyError


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; without `fcntl` (Windows) nothing is held.

    Raises: `StudyError` if another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise StudyError(
                f"another autoprec (process {owner}) is tuning in {folder}; wait for it or pass another --run-dir"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
