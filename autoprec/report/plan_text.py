"""A modeled plan on a terminal: places a view with rich and computes nothing."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoprec.report.plan_view import PlanView


def print_plan(view: PlanView, console: Console) -> None:
    """Print a modeled plan."""
    console.print(Text(view.headline, style="bold"))
    console.print(_grid(view.facts))
    for title, rows in (("Baselines, modeled", view.baselines), ("Predicted Pareto front, modeled", view.front)):
        if rows:
            console.print(Text(f"\n{title}"))
            console.print(_grid(rows))
    if view.kept:
        console.print(Text("\nKept in FP32"))
        console.print(_grid(view.kept))
    console.print()
    for note in view.notes:
        console.print(Text(note, style="dim"))


def print_profiles(rows: Sequence[Sequence[str]], sources: Sequence[str], console: Console) -> None:
    """Print the rows of the devices and where their figures come from."""
    console.print(_grid(rows))
    console.print(Text("\nSources"))
    for line in sources:
        console.print(Text(f"  {line}", style="dim"))


def _grid(rows: Sequence[Sequence[str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in rows[0]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(f"  {cell}" if place == 0 else cell) for place, cell in enumerate(row)))
    return table
