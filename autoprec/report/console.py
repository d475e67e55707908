"""The consoles that commands print on."""

import os

from rich.console import Console

_WIDTH = 120


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; where that is no terminal and nobody says how wide it is, 120 columns."""
    found = Console(stderr=stderr, highlight=False)
    is_known = found.is_terminal or "COLUMNS" in os.environ
    return found if is_known else Console(stderr=stderr, highlight=False, width=_WIDTH)
