"""The gates file: thresholds that are agreed before an audit, in YAML, committed beside the policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import yaml

from autoprec.audit.gate import Gate, Threshold, Thresholds
from autoprec.errors import GatesError, PolicyFileError
from autoprec.policy.yaml_nodes import Entry, compose
from autoprec.policy.yaml_text import scalar

SCHEMA = 1
SCHEMA_KEY = "autoprec_gates"
_OFF = ("off", False)  # YAML 1.1 reads off as false


@dataclass(frozen=True, kw_only=True)
class GatesFile:
    """What a gates file says: `thresholds` by gate as far as it sets them, and `off`, where it turns gates off."""

    thresholds: Mapping[str, Thresholds] = field(default_factory=dict)
    off: Mapping[str, str] = field(default_factory=dict)


def load_gates(path: Path, gates: Sequence[Gate]) -> GatesFile:
    """Return what the file says about `gates`.

    Raises: `GatesError`, whose message starts with `file:line:`, naming what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise GatesError(f"{path}: the gates file cannot be read: {reason}") from error
    try:
        return _gates_file(compose(text, str(path)), {gate.name: gate for gate in gates})
    except PolicyFileError as error:
        raise GatesError(str(error).replace("a policy starts with autoprec: 1", _START)) from error


_START = f"a gates file starts with {SCHEMA_KEY}: {SCHEMA}"


def default_gates(gates: Sequence[Gate]) -> str:
    """Return the text of a gates file with every threshold at its default, and what each means."""
    lines = [f"{SCHEMA_KEY}: {SCHEMA}"]
    for gate in gates:
        lines += ["", f"# {gate.name} proves that {gate.proves}; turn it off with {gate.name}: off"]
        lines.append(f"{gate.name}:" if gate.thresholds else f"{gate.name}: {{}}")
        for name, row in gate.thresholds.items():
            unit = f" ({row.unit})" if row.unit else ""
            lines.append(f"  {name}: {_number(row.default)}  # {row.means}{unit}")
    return "\n".join(lines) + "\n"


def check_names(names: Sequence[str], gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """Return the gates called so, in the order they run; all of them if there are no names.

    Raises: `GatesError` for a name that is no gate.
    """
    known = [gate.name for gate in gates]
    for name in names:
        if name not in known:
            raise GatesError(
                f'--only names "{name}", which is no gate; gates: {", ".join(known)}{_nearest(name, known)}'
            )
    return tuple(gate for gate in gates if not names or gate.name in names)


def _gates_file(root: Entry, gates: Mapping[str, Gate]) -> GatesFile:
    _check_schema(root)
    thresholds: dict[str, Thresholds] = {}
    off: dict[str, str] = {}
    for name, entry in root.mapping("the gates file", (SCHEMA_KEY, *gates)).items():
        if name == SCHEMA_KEY:
            continue
        if _is_off(entry):
            off[name] = f"{entry.file}:{entry.line}"
            continue
        rows = gates[name].thresholds
        given = entry.mapping(f"gate {name}", tuple(rows)) if rows else entry.mapping(f"gate {name}, which has no keys")
        if given and not rows:
            entry.fail(f"gate {name} has no thresholds; write {name}: off, or leave it out")
        thresholds[name] = {key: _value(value, f"{name}.{key}", rows[key]) for key, value in given.items()}
    return GatesFile(thresholds=thresholds, off=off)


def _check_schema(root: Entry) -> None:
    entries = root.mapping("the gates file")
    if SCHEMA_KEY not in entries:
        root.fail(f"not a gates file: the key {SCHEMA_KEY}, the schema version, is missing; {_START}")
    schema = entries[SCHEMA_KEY].integer(f"{SCHEMA_KEY} (the schema version)")
    if schema > SCHEMA:
        entries[SCHEMA_KEY].fail(
            f"the gates file has schema {schema}, from a newer autoprec, and this one reads up to {SCHEMA}; upgrade it"
        )
    if schema < 1:
        entries[SCHEMA_KEY].fail(f"the gates file has schema {schema}; schemas: 1 to {SCHEMA}")


def _is_off(entry: Entry) -> bool:
    return isinstance(entry.node, yaml.ScalarNode) and entry.scalar("a gate") in _OFF


def _value(entry: Entry, what: str, row: Threshold) -> float:
    value = float(entry.integer(what)) if row.whole else entry.number(what)
    if not row.minimum <= value <= row.maximum:
        entry.fail(f"{what} is {_number(value)}; allowed: {allowed(row)}")
    return value


def allowed(row: Threshold) -> str:
    """Return in words which numbers a threshold may be."""
    kind = "whole numbers" if row.whole else "numbers"
    if row.maximum == float("inf"):
        return f"{kind} from {_number(row.minimum)}"
    return f"{kind} from {_number(row.minimum)} to {_number(row.maximum)}"


def _number(value: float) -> str:
    return scalar(int(value) if float(value).is_integer() else value)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f'; nearest: "{near[0]}"' if near else ""
