"""What `autoprec policy` prints: tables and lines for people, and the same as plain values for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from autoprec.policy import Policy, PolicyDiff, ResolvedPolicy, RuleDifference, SettingDifference

_SCHEMA_VERSION = 1


def check_plain(
    policy: "Policy", resolved: "ResolvedPolicy | None", emulated: "Sequence[str]", findings: "Sequence[str]"
) -> dict[str, Any]:
    """Return what a check found; the rules have no `num_sites` where no workload is given."""
    wins = [None] * len(policy.rules) if resolved is None else [len(sites) for sites in resolved.sites_of_rule]
    return {
        "schema_version": _SCHEMA_VERSION,
        "policy": policy.name,
        "num_sites": None if resolved is None else len(resolved.winners),
        "rules": [
            {"sites": rule.sites, "format": rule.format, "num_sites": num}
            for rule, num in zip(policy.rules, wins, strict=True)
        ],
        "emulated": list(emulated),
        "findings": list(findings),
    }


def diff_plain(a: "Policy", b: "Policy", found: "PolicyDiff") -> dict[str, Any]:
    """Return the differences as plain values."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "a": a.name,
        "b": b.name,
        "equal": not found,
        "settings": [{"name": item.name, "a": item.a, "b": item.b} for item in found.settings],
        "rules": [
            {"side": item.side, "index": item.index, "sites": item.rule.sites, "format": item.rule.format}
            for item in found.rules
        ],
        "sites": [
            {
                "site": str(item.site),
                "a": {"format": item.a.format, "rule": item.a.sites},
                "b": {"format": item.b.format, "rule": item.b.sites},
            }
            for item in found.sites
        ],
    }


def about_preset(file: str) -> list[str]:
    """Return what system a preset stands for and what it leaves out; nothing for a file."""
    from autoprec.policy import PRESETS

    if Path(file).exists():
        return []
    row = PRESETS[file]
    return [f"{'stands for':<15} {row.stands_for}", *(f"{'left out':<15} {text}" for text in row.leaves_out)]


def resolution_table(resolved: "ResolvedPolicy", *, with_dead: bool) -> "Table":
    """Return a table of rules with the sites that they win; rules that win nowhere only `with_dead`."""
    rows = [
        (str(index + 1), rule.sites, rule.format, str(len(sites)), str(sites[0]) if sites else "")
        for index, (rule, sites) in enumerate(zip(resolved.policy.rules, resolved.sites_of_rule, strict=True))
        if sites or with_dead
    ]
    title = f"{len(resolved.winners)} sites"
    return table_of(title, ("#", "sites", "format", "wins", "for example"), rows)


def draw_diff(a: str, b: str, found: "PolicyDiff", *, with_sites: bool) -> None:
    """Print the settings, the rules and, on a workload, the sites that differ."""
    if not found:
        typer.echo(f"{a} and {b} do the same")
    from autoprec.policy.yaml_text import flow

    for setting in found.settings:
        typer.echo(f"{setting.name}: {' -> '.join(flow(value) for value in _differing(setting))}")
    for run in _runs(found.rules):
        first, last = run[0], run[-1]
        sign, sites = {"a": "-", "b": "+"}[first.side], ", ".join(change.rule.sites for change in run)
        if first is last:
            typer.echo(f"{sign} rule {first.index + 1}: {sites} {first.rule.format}")
        else:
            typer.echo(f"{sign} rules {first.index + 1} to {last.index + 1}, all {first.rule.format}: {sites}")
    if with_sites:
        rows = [(str(item.site), item.a.format, item.b.format, item.a.sites, item.b.sites) for item in found.sites]
        columns = ("site", "format a", "format b", "rule a", "rule b")
        draw(table_of(f"{len(rows)} sites run in another format", columns, rows))


def _differing(setting: "SettingDifference") -> tuple[object, object]:
    """Return both values of a setting; where both have the same keys, without those that agree."""
    a, b = setting.a, setting.b
    if not (isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys()):
        return a, b
    keys = [key for key in a if a[key] != b[key]]
    return {key: a[key] for key in keys}, {key: b[key] for key in keys}


def _runs(changes: "Sequence[RuleDifference]") -> "list[list[RuleDifference]]":
    """Return the changes in runs of rules that follow each other in one policy and give one format."""
    runs: list[list[RuleDifference]] = []
    for change in changes:
        last = runs[-1][-1] if runs else None
        if last and (last.side, last.index + 1, last.rule.format) == (change.side, change.index, change.rule.format):
            runs[-1].append(change)
        else:
            runs.append([change])
    return runs


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(_json_safe(value), indent=2, ensure_ascii=False, allow_nan=False))


def _json_safe(value: Any) -> Any:
    """Return `value` with text (`nan`, `inf`) for the numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def table_of(title: str, columns: tuple[str, ...], rows: "Sequence[tuple[str, ...]]") -> "Table":
    """Return a table of text."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def draw(table: "Table") -> None:
    """Print a table."""
    from autoprec.report.console import console

    console().print(table)
