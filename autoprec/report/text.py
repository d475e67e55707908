"""The terminal summary: places a view with rich and computes nothing."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.report.views import RunView, TrialRow


def print_run(view: RunView, console: Console) -> None:
    """Print a run's summary."""
    console.print(render_run(view))


def render_run(view: RunView) -> RenderableType:
    """Return a run's summary as something rich prints."""
    parts: list[RenderableType] = [Text(view.headline, style="bold"), _pairs(view.facts)]
    if view.baselines:
        parts += [Text("\nBaselines"), _trials(view.baselines)]
    if view.best:
        parts += [Text("\nFastest of the search"), _trials(view.best)]
    if view.kept_title:
        parts += [Text(f"\n{view.kept_title}")]
    if view.kept:
        parts += [_kept(view)]
    if view.proof:
        parts += [Text("\nProof"), _pairs(view.proof)]
    if view.usage:
        parts += [Text("\nUse it"), *(Text(f"  {line}", style="cyan") for line in view.usage)]
    if view.files:
        parts += [Text(""), _pairs(view.files)]
    return Group(*parts)


def _pairs(pairs: tuple[tuple[str, str], ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in pairs:
        table.add_row(Text(f"  {label}", style="dim"), Text(text))
    return table


def _trials(rows: tuple[TrialRow, ...]) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    for heading in ("policy", "step", "speed-up vs fp32", "fidelity", "memory"):
        table.add_column(heading, no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        style = "bold" if row.is_written else ""
        cells = (row.name, row.step, row.speedup, row.fidelity, row.memory, row.note)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _kept(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for row in view.kept:
        table.add_row(Text(f"  {row.sites}"), Text(row.count, style="dim"), Text(row.why))
    return table
