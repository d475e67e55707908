"""An audit on a terminal: places a view with rich and computes nothing."""

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoprec.report.audit_view import AuditView, FailureView, GateRow
from autoprec.report.console import pairs_table
from autoprec.report.text import print_trimmed

_STYLES = {"pass": "green", "fail": "bold red", "not-applicable": "dim"}


def print_audit(view: AuditView, console: Console) -> None:
    """Print an audit; off a terminal without the spaces that fill lines up."""
    print_trimmed(render_audit(view), console)


def render_audit(view: AuditView) -> RenderableType:
    """Return an audit as something rich prints."""
    parts: list[RenderableType] = [
        Text(view.headline, style="bold"),
        pairs_table(view.facts),
        Text(""),
        _gates(view.gates),
    ]
    for failure in view.failures:
        parts += [Text(""), *_failure(failure)]
    return Group(*parts, Text(""), pairs_table(view.files))


def _gates(rows: tuple[GateRow, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(" gate", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("measured", overflow="fold", ratio=3)
    table.add_column("threshold", overflow="fold", max_width=max(9, *(min(cell_len(r.threshold), 26) for r in rows)))
    for row in rows:
        style = _STYLES[row.state]
        quiet = "dim" if row.state == "not-applicable" else ""
        measured = Text(row.measured, style=quiet)
        for note in row.notes:
            measured.append(f"\n{note}", style="dim")
        table.add_row(Text(f" {row.gate}", style=quiet), Text(row.verdict, style=style), measured, Text(row.threshold))
    return table


def _failure(failure: FailureView) -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text.assemble((failure.gate, "bold red"), f"  a pass proves that {failure.proves}"),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text("  found", style="dim"), Text(failure.measured))
    if failure.threshold:
        table.add_row(Text("  allowed", style="dim"), Text(failure.threshold))
    parts.append(table)
    for row in failure.evidence:
        numbers = f"  ({row.number}, allowed {row.threshold})" if row.number and row.threshold else ""
        numbers = numbers or (f"  ({row.number})" if row.number else "")
        parts.append(Padding(Text.assemble((row.where, "bold"), f"  {row.what}{numbers}"), (0, 0, 0, 4)))
    if failure.more:
        parts.append(Padding(Text(failure.more, style="dim"), (0, 0, 0, 4)))
    if failure.advice:
        next_step = Table.grid(padding=(0, 2))
        next_step.add_column(no_wrap=True)
        next_step.add_column(overflow="fold")
        next_step.add_row(Text("  next", style="dim"), Text(failure.advice, style="cyan"))
        parts.append(next_step)
    return parts
