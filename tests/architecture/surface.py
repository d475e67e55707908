"""What autoprec shows to the outside: its public names, and the commands and options of its command line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

import autoprec
from autoprec.cli import app

COMMITTED = Path(__file__).parent
ROOT = Path(__file__).parents[2]


def public_names() -> list[str]:
    return sorted(autoprec.__all__)


def command_lines() -> list[str]:
    """Return one line for each command: its path, its arguments, and its options in order of the alphabet."""
    return [" ".join([path, *arguments, *sorted(options)]) for path, arguments, options in commands()]


def commands() -> list[tuple[str, list[str], set[str]]]:
    """Return for each command its path (`autoprec policy check`), its arguments and its options."""
    return list(_walk(typer.main.get_command(app), "autoprec"))


def _walk(command: Any, path: str) -> Iterator[tuple[str, list[str], set[str]]]:
    arguments = [param.name.upper() for param in command.params if param.param_type_name == "argument"]
    options = {
        name
        for param in command.params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    yield path, arguments, options | {"--help", "-h"}
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _walk(child, f"{path} {name}")
