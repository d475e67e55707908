"""Where an exception comes from: the user's own line, below autoprec's and above the libraries' frames."""

import sysconfig
import traceback
from pathlib import Path

_AUTOPREC = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)

# How a torch function mode calls the function it stands before, and how a leaf module's forward in short does.
_RUNS_AN_OP = ("func(", "F.linear(", "._conv_forward(", "original(self, ")


def origin(error: BaseException, file: Path | None = None) -> str:
    """Return `file:line` of the deepest frame in `file`, or else in code that is neither autoprec's nor a library's.

    A syntax error comes from the line it names. Empty if there is no such frame: the fault is not the user's.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{shown(Path(error.filename))}:{error.lineno}"
    frames = [(Path(frame.filename), frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if file is not None:
        inside = [(path, line) for path, line in frames if path.resolve() == file.resolve()]
        frames = inside or frames
    users = [(path, line) for path, line in frames if _is_users(path)]
    return f"{shown(users[-1][0])}:{users[-1][1]}" if users else ""


def is_users(error: BaseException) -> bool:
    """Return whether the user's code raised: directly, in a library it called, or in an op that autoprec ran for it.

    Recording and casting run the user's torch functions; what those raise passes through autoprec's frames first.
    """
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))
    runs_users_op = False
    for frame in frames:
        path = Path(frame.filename)
        if _is_users(path):
            return True
        if path.resolve().is_relative_to(_AUTOPREC):
            runs_users_op = runs_users_op or any(call in (frame.line or "") for call in _RUNS_AN_OP)
            if not runs_users_op:
                return False
    return False


def _is_users(path: Path) -> bool:
    if path.name.startswith("<"):
        return False
    resolved = path.resolve()
    return not any(resolved.is_relative_to(folder) for folder in (_AUTOPREC, *_LIBRARIES))


def shown(path: Path) -> str:
    """Return the path as a user would type it: relative if it lies below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
