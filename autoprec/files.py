"""Writing files so that nothing is ever half there: beside their name, then renamed."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from autoprec.errors import OutputError

_ROOM_BYTES = 16 * 2**20  # a study, a record and a policy of an ordinary run take under a tenth of this


def check_writable(folder: Path) -> None:
    """Create `folder` if need be and prove that a file can be written there.

    Raises: `OutputError` if it is no folder, read-only, or its disk is full. Called before hours are spent.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".autoprec-"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(
            f"cannot write into {folder}: {error.strerror or error}; name a folder you can write to (--out, --run-dir)"
        ) from error
    if free < _ROOM_BYTES:
        raise OutputError(
            f"cannot write into {folder}: its disk has {free / 2**20:.1f} MiB left and a run needs up to "
            f"{_ROOM_BYTES / 2**20:.0f} MiB; free some space or name another folder (--out, --run-dir)"
        )


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    Raises: `OutputError` if it cannot be written; a file that was there stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the folder is gone or is no folder; the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; free some space or name another place"
        ) from error
