"""The policy file: YAML that a person can read and edit, with one way to write each policy."""

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from autoprec.errors import PolicyFileError
from autoprec.files import write_text
from autoprec.policy.parameters import Parameters
from autoprec.policy.policy import COMPANIONS, Float8, LossScale, Policy, Rule
from autoprec.policy.yaml_nodes import Entry, compose
from autoprec.policy.yaml_text import aligned, flow, quoted, scalar

SCHEMA = 1

_KEYS = (
    "autoprec",
    "name",
    "device",
    "parameters",
    "float32_matmul",
    "float8",
    "loss_scale",
    "memory_format",
    "optimizer",
    "compile",
    "outputs",
    "rules",
    "fallback",
    "evidence",
)
_RULE_KEYS = ("sites", "format", "why")
# Fields of a loss scale that are written although they have their default; dynamic states all.
_STATED = {"none": ("kind",), "static": ("kind", "initial")}
_LONGEST_LINE = 120
_ANY = (Rule(sites="*", format="fp32"),)


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Return the policy in a file.

    Raises: `PolicyFileError`, whose message starts with `file:line:`, if the file cannot be read, is not a policy,
    or is of a newer schema than this version of autoprec knows.
    """
    return _policy(_root(path))


def parse_policy(text: str, origin: str) -> Policy:
    """Return the policy in `text`, as `dump_policy` writes it; `origin` stands for the file in messages.

    Raises: as `load_policy` does.
    """
    return _policy(compose(text, origin))


def rule_lines(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the line of each rule of a policy file, counted from 1."""
    root = _root(path).mapping("the policy")
    return tuple(entry.line for entry in root["rules"].sequence("rules"))


def dump_policy(policy: Policy) -> str:
    """Return the text of the policy file: the same policy always gives the same text."""
    lines = [f"autoprec: {SCHEMA}", f"name: {scalar(policy.name)}"]
    plain = to_plain(policy)
    if policy.device:
        lines.append(f"device: {flow(plain['device'])}")
    settings = (
        "parameters",
        "float32_matmul",
        *(("float8",) if policy.float8 != Float8() else ()),
        "loss_scale",
        *(name for name in COMPANIONS if plain[name] != "as_given"),
        "outputs",
    )
    lines += [f"{key}: {flow(plain[key])}" for key in settings]
    cells = [_rule_cells(rule) for rule in policy.rules]
    lines += ["rules:  # first match wins", *(f"  - {line}" for line in aligned(cells))]
    lines.append(f"fallback: {''.join(_rule_cells(policy.fallback))}")
    if policy.evidence:
        lines.append("evidence:")
        lines += _block(plain["evidence"], "  ")
    return "\n".join(lines) + "\n"


def save_policy(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Write the policy file beside its name, then rename it: a reader sees the old file or the new one.

    Raises: `OutputError` if it cannot be written; a file that was there stays as it was.
    """
    write_text(Path(path), dump_policy(policy))


def to_plain(policy: Policy) -> dict[str, Any]:
    """Return the policy as mappings, lists and scalars, in the shape of the file; every key is there."""
    return {
        "autoprec": SCHEMA,
        "name": policy.name,
        "device": {key: policy.device[key] for key in sorted(policy.device)},
        "parameters": _parameters_plain(policy.parameters),
        "float32_matmul": policy.float32_matmul,
        "float8": {"scaling": policy.float8.scaling},
        "loss_scale": _loss_scale_plain(policy.loss_scale),
        "memory_format": policy.memory_format,
        "optimizer": policy.optimizer,
        "compile": policy.compile,
        "outputs": policy.outputs,
        "rules": [_rule_plain(rule) for rule in policy.rules],
        "fallback": _rule_plain(policy.fallback),
        "evidence": _sorted_plain(policy.evidence),
    }


def _sorted_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_plain(value[key]) for key in sorted(value)}
    return [_sorted_plain(item) for item in value] if isinstance(value, tuple) else value


def _block(values: Mapping[str, Any], indent: str) -> list[str]:
    """Return a mapping with one key a line; what is itself a mapping too long for a line goes on below its key."""
    lines = []
    for key, value in values.items():
        line = f"{indent}{scalar(key)}: {flow(value)}"
        if isinstance(value, Mapping) and len(line) > _LONGEST_LINE:
            lines += [f"{indent}{scalar(key)}:", *_block(value, f"{indent}  ")]
        else:
            lines.append(line)
    return lines


def _rule_plain(rule: Rule) -> dict[str, str]:
    why = {"why": rule.why} if rule.why else {}
    return {"sites": rule.sites, "format": rule.format, **why}


def _rule_cells(rule: Rule) -> tuple[str, str]:
    why = f", why: {quoted(rule.why)}" if rule.why else ""
    return f"{{sites: {quoted(rule.sites)}, ", f"format: {rule.format}{why}}}"


def _parameters_plain(parameters: Parameters) -> dict[str, Any]:
    """Return the storage and what differs from its default."""
    default = Parameters()
    values = {item.name: getattr(parameters, item.name) for item in fields(Parameters)}
    stated = {key: value for key, value in values.items() if key == "storage" or value != getattr(default, key)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in stated.items()}


def _loss_scale_plain(loss_scale: LossScale) -> Any:
    if loss_scale == LossScale():
        return "none"
    default = LossScale()
    stated = _STATED.get(loss_scale.kind)
    names = [
        item.name
        for item in fields(LossScale)
        if stated is None or item.name in stated or getattr(loss_scale, item.name) != getattr(default, item.name)
    ]
    return {name: _whole(getattr(loss_scale, name)) for name in names}


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an int where that is the shorter way to write it."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _root(path: str | os.PathLike[str]) -> Entry:
    file = os.fspath(path)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PolicyFileError(f"{file}: the policy file cannot be read: {reason}") from error
    return compose(text, file)


def _policy(root: Entry) -> Policy:
    _check_schema(root)
    entries = root.mapping("the policy", _KEYS)
    for key in ("name", "rules"):
        if key not in entries:
            root.fail(f'the policy has no key "{key}"; add it')
    given: dict[str, Any] = {
        "name": entries["name"].text("name"),
        "rules": tuple(_rule(entry, "a rule") for entry in entries["rules"].sequence("rules")),
    }
    readers = {
        "device": _device,
        "parameters": _parameters,
        "float32_matmul": lambda entry: entry.text("float32_matmul"),
        "float8": _float8,
        "loss_scale": _loss_scale,
        "memory_format": lambda entry: entry.text("memory_format"),
        "optimizer": lambda entry: entry.text("optimizer"),
        "compile": lambda entry: entry.text("compile"),
        "outputs": lambda entry: entry.text("outputs"),
        "fallback": lambda entry: _rule(entry, "fallback"),
        "evidence": _evidence,
    }
    for key, read in readers.items():
        if key in entries:
            given[key] = read(entries[key])
    for key, value in given.items():  # one field at a time, so that the message has the line of the field
        if key not in ("name", "rules"):
            entries[key].build(partial(_checked_alone, key, value))
    return entries["rules"].build(lambda: Policy(**given))


def _checked_alone(key: str, value: Any) -> Policy:
    return Policy(name="", rules=_ANY, **{key: value})


def _check_schema(root: Entry) -> None:
    entries = root.mapping("the policy")
    if "autoprec" not in entries:
        root.fail(f"not a policy: the key autoprec, the schema version, is missing; add autoprec: {SCHEMA}")
    schema = entries["autoprec"].integer("autoprec (the schema version)")
    if schema > SCHEMA:
        entries["autoprec"].fail(
            f"the policy has schema {schema}, from a newer autoprec; this one reads up to {SCHEMA}; upgrade autoprec"
        )
    if schema < 1:
        entries["autoprec"].fail(f"the policy has schema {schema}; schemas: 1 to {SCHEMA}")


def _rule(entry: Entry, what: str) -> Rule:
    entries = entry.mapping(what, _RULE_KEYS)
    for key in ("sites", "format"):
        if key not in entries:
            entry.fail(f'{what} has no key "{key}"; a rule reads {{sites: "*", format: fp32}}')
    texts = {key: value.text(f"{key} of {what}") for key, value in entries.items()}
    return entry.build(lambda: Rule(**texts))


def _device(entry: Entry) -> dict[str, str]:
    return {key: value.text(f"device.{key}") for key, value in entry.mapping("device", ("kind", "name")).items()}


def _parameters(entry: Entry) -> Parameters:
    entries = entry.mapping("parameters", [item.name for item in fields(Parameters)])
    given: dict[str, Any] = {key: value.text(f"parameters.{key}") for key, value in entries.items() if key != "keep"}
    if "keep" in entries:
        globs = entries["keep"].sequence("parameters.keep")
        given["keep"] = tuple(glob.text("a glob of parameters.keep") for glob in globs)
    return entry.build(lambda: Parameters(**given))


def _float8(entry: Entry) -> Float8:
    entries = entry.mapping("float8", [item.name for item in fields(Float8)])
    given: dict[str, Any] = {key: value.text(f"float8.{key}") for key, value in entries.items()}
    return entry.build(lambda: Float8(**given))


def _loss_scale(entry: Entry) -> LossScale:
    if entry.node.value == "none":
        return LossScale()
    entries = entry.mapping("loss_scale", [item.name for item in fields(LossScale)])
    if "kind" not in entries:
        entry.fail('loss_scale has no key "kind"; kinds: none, static, dynamic')
    given: dict[str, Any] = {}
    for key, value in entries.items():
        read = {"kind": value.text, "growth_interval": value.integer}.get(key, value.number)
        given[key] = read(f"loss_scale.{key}")
    return entry.build(lambda: LossScale(**given))


def _evidence(entry: Entry) -> Any:
    entry.mapping("evidence")
    try:
        return entry.plain("evidence")
    except RecursionError:
        entry.fail("evidence is nested too deep, or contains itself")
