"""The consoles that commands print on, and what several of their pages are made of."""

import os
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 120


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; where that is no terminal and nobody says how wide it is, 120 columns."""
    found = Console(stderr=stderr, highlight=False)
    is_known = found.is_terminal or "COLUMNS" in os.environ
    return found if is_known else Console(stderr=stderr, highlight=False, width=_WIDTH)


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return labels and what they stand for, side by side."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in pairs:
        table.add_row(Text(f"  {label}", style="dim"), Text(text))
    return table
