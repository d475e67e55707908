"""Op and cast times on disk, so that what was measured once on a device is not measured again."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoprec.errors import OutputError, RecordError
from autoprec.files import write_text
from autoprec.measure.cast_time import CastTime
from autoprec.measure.op_call import Kept
from autoprec.measure.paired import Timing
from autoprec.records.codec import decode, encode
from autoprec.runtime.device import DeviceInfo

SCHEMA_VERSION = 1
VARIABLE = "AUTOPREC_CACHE"
_OFF = frozenset({"", "0", "off", "no"})


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTime:
    """What one signature takes in one format, and what it keeps for its backward pass."""

    timing: Timing
    kept: Kept


@dataclass(frozen=True, kw_only=True)
class StoredTimes:
    """Everything measured on one device: times by signature and format, and points of casts by their key."""

    device: str
    torch: str
    num_threads: int
    ops: Mapping[str, Mapping[str, OpTime]] = field(default_factory=dict)
    casts: Mapping[str, tuple[CastTime, ...]] = field(default_factory=dict)

    def merged(self, other: "StoredTimes") -> "StoredTimes":
        """Return these times and those of `other`; where both have one, that of `other`."""
        ops = {name: {**self.ops.get(name, {}), **other.ops.get(name, {})} for name in {**self.ops, **other.ops}}
        casts = {**self.casts}
        for name, points in other.casts.items():
            if len(points) >= len(casts.get(name, ())):
                casts[name] = points
        return StoredTimes(device=self.device, torch=self.torch, num_threads=self.num_threads, ops=ops, casts=casts)


def nothing_stored(device: DeviceInfo) -> StoredTimes:
    """Return the times of a device on which nothing was measured."""
    return StoredTimes(device=device.name, torch=device.torch_version, num_threads=device.num_threads)


def cache_folder() -> Path | None:
    """Return where times are kept: `AUTOPREC_CACHE`, else the user's cache folder; None if it is switched off.

    `AUTOPREC_CACHE=off` (or `0`, `no`, or empty) switches it off.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named.lower() in _OFF else Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():  # the specification says to ignore a relative one
        return Path(base) / "autoprec"
    try:
        return Path.home() / ".cache" / "autoprec"
    except RuntimeError:  # a user without a home
        return None


def cache_file(folder: Path, device: DeviceInfo) -> Path:
    """Return the file for a device, torch version and number of threads."""
    fresh = nothing_stored(device)
    text = json.dumps([device.kind, fresh.device, fresh.torch, fresh.num_threads])
    return folder / f"op-times-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def load_times(device: DeviceInfo) -> tuple[StoredTimes, tuple[str, ...]]:
    """Return what is stored for a device, and notes on what could not be used.

    A file that is damaged, foreign, or of another schema counts as not there; it is replaced by the next `save_times`.
    """
    fresh, folder = nothing_stored(device), cache_folder()
    if folder is None:
        return fresh, ()
    path = cache_file(folder, device)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return fresh, ()
    except (OSError, UnicodeDecodeError) as error:
        return fresh, (f"op times: cannot read {path} ({error}); all are measured anew",)
    return _parsed(text, path, fresh)


def save_times(device: DeviceInfo, times: StoredTimes) -> tuple[str, ...]:
    """Store `times` beside what other runs have stored meanwhile; return notes on what went wrong."""
    folder = cache_folder()
    if folder is None:
        return ()
    path = cache_file(folder, device)
    merged = load_times(device)[0].merged(times)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"schema_version": SCHEMA_VERSION, **encode(merged)}, indent=1) + "\n")
    except (OSError, OutputError) as error:
        return (f"op times: not stored ({error}); the next run measures again; {VARIABLE} names another folder",)
    return ()


def _parsed(text: str, path: Path, fresh: StoredTimes) -> tuple[StoredTimes, tuple[str, ...]]:
    try:
        data: Any = json.loads(text)
        version = data.pop("schema_version")
        if version != SCHEMA_VERSION:
            note = f"op times: {path} has schema {version}, and this autoprec uses {SCHEMA_VERSION}"
            return fresh, (f"{note}; all are measured anew",)
        found = decode(StoredTimes, data, where=str(path))
    except (ValueError, KeyError, AttributeError, TypeError, RecordError) as error:
        return fresh, (f"op times: {path} is damaged or not autoprec's ({error}); all are measured anew",)
    if (found.device, found.torch, found.num_threads) != (fresh.device, fresh.torch, fresh.num_threads):
        return fresh, (f"op times: {path} is of another device or torch version; all are measured anew",)
    return found, ()
