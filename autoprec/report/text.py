"""The terminal summary: places a view with rich and computes nothing."""

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoprec.report.console import pairs_table
from autoprec.report.views import RunView, TrialRow


def print_run(view: RunView, console: Console) -> None:
    """Print a run's summary; off a terminal without the spaces that fill lines up."""
    print_trimmed(render_run(view), console)


def print_trimmed(page: RenderableType, console: Console) -> None:
    """Print a page; off a terminal without the spaces that fill lines up."""
    if console.is_terminal:
        console.print(page)
        return
    with console.capture() as capture:
        console.print(page)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def render_run(view: RunView) -> RenderableType:
    """Return a run's summary as something rich prints."""
    parts: list[RenderableType] = [Text(view.headline, style="bold"), pairs_table(view.facts)]
    if view.baselines:
        parts += [Text(f"\n{view.baselines_title}"), *_trials(view.baselines)]
    if view.best:
        parts += [Text(f"\n{view.best_title}"), *_trials(view.best)]
    if view.front:
        parts += [Text(f"\n{view.front_title}"), _front(view)]
    if view.kept_title:
        parts += [Text(f"\n{view.kept_title}")]
    if view.kept:
        parts += [_kept(view)]
    if view.proof:
        parts += [Text("\nProof"), pairs_table(view.proof)]
    if view.usage:
        parts += [Text("\nUse it"), *(Text(f"  {line}", style="cyan") for line in view.usage)]
    if view.files:
        parts += [Text(""), pairs_table(view.files)]
    return Group(*parts)


def _trials(rows: tuple[TrialRow, ...]) -> list[RenderableType]:
    """Return a line for the headings and for each row, and below a row its note.

    No rich table: it would give notes a column, or cut numbers to make room. A line too long for a terminal wraps.
    """
    table = [("policy", "speed-up vs fp32", "step", "lost", "memory")]
    table += [(row.name, row.speedup, row.step, row.steps_lost, row.memory) for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    headings, *lines = (
        "  ".join(set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in table
    )
    parts: list[RenderableType] = [Text(f" {headings}", style="dim")]
    for row, line in zip(rows, lines, strict=True):
        parts.append(Text(f" {line}", style="bold" if row.is_written else ""))
        if row.note:
            parts.append(Padding(Text(row.note, style="dim", overflow="fold"), (0, 0, 0, 4)))
    return parts


def _front(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(overflow="fold")
    table.add_row(*(Text(each, style="dim") for each in (" policy", "speed-up vs fp32", "memory", "error, predicted")))
    for row in view.front:
        table.add_row(Text(f" {row.name}"), Text(row.speedup), Text(row.memory), Text(row.error))
    return table


def _kept(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(overflow="fold")
    for row in view.kept:
        table.add_row(Text(f"  {row.sites}"), Text(row.count, style="dim"), Text(row.price), Text(row.why))
    return table
