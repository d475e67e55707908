"""`autoprec env`: the device, the formats it runs, and the versions that matter."""

import json
import platform
from typing import Annotated, Any

import typer

import autoprec

_PACKAGES = ("torch", "torchao", "optuna", "networkx", "scipy", "PyYAML", "typer", "rich")


def env(
    *,
    device: Annotated[str, typer.Option(help="Device to describe: auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show the device, the formats it runs and those it has units for, and the versions of what autoprec stands on."""
    facts = _facts(device)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for label, value in _lines(facts):
        typer.echo(f"{label:<12}{value}")


def _facts(kind: str) -> dict[str, Any]:
    from autoprec.runtime.device import describe

    info = describe(kind)
    return {
        "schema_version": 1,
        "device": {
            "kind": info.kind,
            "name": info.name,
            "capability": dict(info.capability),
            "formats": list(info.formats),
            "native_formats": list(info.native_formats),
            "emulated_formats": list(info.emulated_formats),
            "num_threads": info.num_threads,
        },
        "versions": {"autoprec": autoprec.__version__, "python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
    }


def _versions() -> dict[str, str | None]:
    """Return the version of every package autoprec uses; None where it is not installed."""
    from importlib import metadata

    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    device = facts["device"]
    capability = ", ".join(f"{key} {value}" for key, value in device["capability"].items())
    versions = [(name, version or "not installed") for name, version in facts["versions"].items()]
    return [
        ("device", f"{device['kind']}: {device['name']}"),
        ("capability", capability or "-"),
        ("formats", ", ".join(device["formats"])),
        ("native", ", ".join(device["native_formats"]) or "-"),
        ("emulated", ", ".join(device["emulated_formats"]) or "-"),
        ("threads", str(device["num_threads"])),
        ("platform", facts["platform"]),
        *versions,
    ]
