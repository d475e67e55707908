"""An inspection on a terminal: places a view with rich and computes nothing."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.report.console import pairs_table
from autoprec.report.inspect_view import FindingRow, InspectView, LayerRow

_STYLES = {"error": "bold red", "must": "bold red", "warning": "yellow", "prefer": "yellow", "note": "dim", "free": ""}


def print_inspection(view: InspectView, console: Console) -> None:
    """Print an inspection."""
    console.print(render_inspection(view))


def render_inspection(view: InspectView) -> RenderableType:
    """Return an inspection as something rich prints."""
    parts: list[RenderableType] = [Text(view.headline, style="bold"), Text(), pairs_table(view.facts)]
    parts += [Text(), _columns(view.verdicts)]
    if view.findings:
        parts += [Text("\nFindings", style="bold"), _findings(view.findings)]
    parts += [Text("\nLayers", style="bold"), _layers(view.layers)]
    if view.storage:
        parts += [Text("\nStorage", style="bold"), _columns(view.storage)]
    if view.storage_verdicts:
        parts += [Text(), _columns(view.storage_verdicts)]
    if view.storage_notes:
        parts += [Text(), _notes(view.storage_notes)]
    return Group(*parts)


def _columns(rows: tuple[tuple[str, ...], ...]) -> Table:
    """Return a table whose first row is its heading and whose cells after the first are numbers."""
    table = Table.grid(padding=(0, 3))
    for index in range(len(rows[0])):
        table.add_column(justify="right" if index else "left", no_wrap=True)
    for index, (label, *cells) in enumerate(rows):
        style = "" if index else "dim"
        table.add_row(Text(f"  {label}", style=style or "dim"), *(Text(cell, style=style) for cell in cells))
    return table


def _findings(rows: tuple[FindingRow, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(Text(f"  {row.severity}", style=_STYLES[row.severity]), Text(row.where, style="bold"))
        table.add_row("", Text(row.message))
        table.add_row("", Text(row.fix, style="cyan"))
    return table


def _notes(notes: tuple[str, ...]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for note in notes:
        table.add_row(Text("  -", style="dim"), Text(note))
    return table


def _layers(rows: tuple[LayerRow, ...]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1))
    table.add_column("  layer", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("sites", justify="right", no_wrap=True)
    table.add_column("kept in FP32, and why", overflow="fold")
    table.add_column("source", no_wrap=True)
    for row in rows:
        lead = (Text(f"  {row.name}"), Text(str(row.num_layers)), Text(str(row.num_sites)))
        if not row.kept:
            table.add_row(*lead, Text("free", style="dim"), "")
        for index, kept in enumerate(row.kept):
            verdict = f" {kept.verdict}{f' in {kept.formats}' if kept.formats else ''}: "
            text = Text.assemble((kept.ops, _STYLES[kept.verdict]), (verdict, "dim"), kept.why)
            table.add_row(*(lead if index == 0 else ("", "", "")), text, Text(kept.source, style="dim"))
    return table
