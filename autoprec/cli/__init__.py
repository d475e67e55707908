"""The command line: one file a command, and here what they share: the app, errors and exit codes.

Exit codes: 0 fine, 1 findings or an unmet gate, 2 wrong usage, input or environment, 3 internal error, 130 Ctrl-C.
`tune` takes SIGTERM for Ctrl-C.
Commands import torch, optuna and their kind inside their functions, so that `autoprec --help` stays quick.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import autoprec
from autoprec.cli.audit import audit
from autoprec.cli.bench import bench
from autoprec.cli.env import env
from autoprec.cli.inspect import inspect
from autoprec.cli.plan import plan
from autoprec.cli.policy import app as policy_app
from autoprec.cli.tune import tune
from autoprec.errors import AutoprecError

__all__ = ["app", "main"]

_INTERNAL_ERROR, _INTERRUPTED, _BROKEN_PIPE = 3, 130, 141
_DEBUG = "AUTOPREC_DEBUG"

app = typer.Typer(
    name="autoprec",
    help="Find, prove and install the fastest precision assignment that trains a PyTorch model as FP32 does.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(inspect)
app.command()(tune)
app.command()(bench)
app.command()(plan)
app.command()(audit)
app.add_typer(policy_app, name="policy")
app.command()(env)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are told on stderr."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    is_debug = "--debug" in words or os.environ.get(_DEBUG, "") not in ("", "0")
    try:
        app(args=words, prog_name="autoprec")
    except SystemExit as stop:
        return _exit_code(stop)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:  # noqa: BLE001 the last place where it can be told
        if is_debug:
            traceback.print_exception(error, file=sys.stderr)
        return _told(error)
    return 0


def _print_version(value: bool) -> None:  # noqa: FBT001 typer calls it with the flag alone
    if value:
        typer.echo(f"autoprec {autoprec.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show the traceback of an error; or set {_DEBUG}=1.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del debug, version  # `main` looks for --debug itself: once a command has failed, its context is gone


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.__context__, BrokenPipeError):  # the reader of our stdout has gone
        return _BROKEN_PIPE
    is_told = not isinstance(getattr(stop.__context__, "__cause__", None), KeyboardInterrupt)
    code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return code if code != _INTERRUPTED or is_told else _interrupted()


def _interrupted() -> int:
    _say("interrupted")
    return _INTERRUPTED


def _told(error: Exception) -> int:
    if isinstance(error, AutoprecError):
        _say(f"error: {error}")
        return error.exit_code
    from autoprec.workload.origin import is_users, origin

    if is_users(error):
        _say(f"error: {origin(error)}: {type(error).__name__}: {error}")
        _say("the workload's own code raised it; autoprec --debug ... shows the traceback")
        return AutoprecError.exit_code
    return _internal_error(error)


def _internal_error(error: Exception) -> int:
    """Tell of a bug in autoprec and keep its traceback in a file."""
    _say(f"internal error: {type(error).__name__}: {error}")
    try:
        with tempfile.NamedTemporaryFile("w", prefix="autoprec-", suffix=".traceback", delete=False) as file:
            file.write(f"autoprec {autoprec.__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n")
            traceback.print_exception(error, file=file)
        _say(f"this is a bug in autoprec: please report it with the file {file.name}")
    except OSError:
        traceback.print_exception(error, file=sys.stderr)
    return _INTERNAL_ERROR


def _say(line: str) -> None:
    typer.echo(line, err=True)
