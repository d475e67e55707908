"""Where a run writes: the policy, the run folder, the study; checked before anything long begins."""

import re
from dataclasses import dataclass
from pathlib import Path

from autoprec.errors import OutputError
from autoprec.files import check_writable
from autoprec.search.storage import check_sqlite, default_storage, sqlite_path


@dataclass(frozen=True, kw_only=True)
class Places:
    """The files of one run."""

    policy: Path | None
    run_dir: Path
    storage: str
    study: str

    @property
    def record(self) -> Path:
        """Return the path of the record."""
        return self.run_dir / "record.json"

    @property
    def fronts(self) -> Path:
        """Return the path of the predicted plans of this study; other studies of the folder have their own."""
        name = re.sub(r"[^A-Za-z0-9_-]", lambda found: f"%{ord(found[0]):x}", self.study)
        return self.run_dir / f"fronts-{name}.json"

    @property
    def front(self) -> Path:
        """Return the folder for the policies of a Pareto front."""
        return self.run_dir / "front"


def claim_places(name: str, out: Path | None, run_dir: Path | None, storage: str | None, study: str | None) -> Places:
    """Return where the run called `name` writes, after a check that it can.

    Raises: `OutputError` for a folder that cannot be written, `StudyError` for a file that is no study.
    """
    folder = run_dir or Path("runs") / name
    check_writable(folder)
    if out is not None:
        if out.is_dir():
            raise OutputError(f"cannot write the policy to {out}: it is a folder; name a file (--out policy.yaml)")
        check_writable(out.parent)
    places = Places(policy=out, run_dir=folder, storage=storage or default_storage(folder), study=study or name)
    check_sqlite(places.storage)
    database = sqlite_path(places.storage)
    if database is not None:
        check_writable(database.parent)
    return places
