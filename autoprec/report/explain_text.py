"""One site on a terminal: places a view with rich and computes nothing."""

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoprec.report.console import pairs_table
from autoprec.report.explain_view import ExplainView, TensorPicture, VerdictRow
from autoprec.report.exponent_axis import NUM_ROWS, Axis, Zone

LABEL_COLUMNS = 12
"""What a picture needs beside its axis: margins and the names of the formats."""

_STYLES = {"must": "bold red", "prefer": "yellow", "free": "green"}
_ZONES: dict[Zone, tuple[str, str]] = {
    "flush": ("0", "red"),
    "subnormal": ("~", "yellow"),
    "normal": ("-", "dim"),
    "overflow": ("X", "bold red"),
}
_LEGEND = "0 becomes zero   ~ loses digits (subnormal)   - held in full   X overflows"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = " ..::==##"  # for a terminal without block characters


def print_explanation(view: ExplainView, console: Console) -> None:
    """Print a site; off a terminal without the spaces that fill lines up."""
    page = render_explanation(view, has_blocks=console.encoding.lower().startswith("utf"))
    if console.is_terminal:
        console.print(page)
        return
    with console.capture() as capture:
        console.print(page)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def render_explanation(view: ExplainView, *, has_blocks: bool = True) -> RenderableType:
    """Return a site as something rich prints."""
    parts: list[RenderableType] = [Text(view.headline, style="bold"), Text(), pairs_table(view.facts)]
    parts += [Text("\nVerdicts", style="bold"), _verdicts(view.verdicts)]
    parts += [Text("\nNeighbors", style="bold"), _neighbors(view.neighbors)]
    parts.append(Text("\nNumbers", style="bold"))
    if view.axis is not None:
        parts.append(Text(f"  {_LEGEND}", style="dim"))
    for picture in view.pictures:
        parts += [Text(), *_picture(picture, view.axis, has_blocks=has_blocks)]
    if not view.pictures:
        parts.append(Text("  none: it computes on integers alone"))
    return Group(*parts)


def _verdicts(rows: tuple[VerdictRow, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(Text(f"  {row.format}"), verdict, Text(row.reasons[0] if row.reasons else "nothing against it"))
        for reason in row.reasons[1:]:
            table.add_row("", "", Text(reason))
    return table


def _neighbors(rows: tuple[tuple[str, str, str], ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    for label, name, source in rows:
        table.add_row(Text(f"  {label}", style="dim"), Text(name), Text(source, style="dim"))
    return table


def _picture(picture: TensorPicture, axis: Axis | None, *, has_blocks: bool) -> list[RenderableType]:
    title = Text(f"  {picture.title}", style="bold")
    parts: list[RenderableType] = [title.append(f"  {picture.comment}" if picture.comment else "", style="not bold")]
    parts.append(Padding(Text(picture.facts), (0, 0, 0, 2)))
    if axis is not None and any(picture.heights):
        parts += [*_bars(picture, has_blocks=has_blocks), *_scale(axis)]
        parts.append(_table(picture.table))
    return parts


def _bars(picture: TensorPicture, *, has_blocks: bool) -> list[Text]:
    """Return the rows of a bar chart, from the top."""
    blocks, rows = _BLOCKS if has_blocks else _ASCII_BLOCKS, []
    for row in reversed(range(NUM_ROWS)):
        filled = (min(max(height - row * 8, 0), 8) for height in picture.heights)
        rows.append(_line("", "".join(blocks[eighths] for eighths in filled).rstrip()))
    return rows


def _scale(axis: Axis) -> list[Text]:
    """Return a row of zones for each format, and the ticks with their labels."""
    rows = []
    for name, zones in axis.zones:
        row = _line(name, "")
        for zone in zones:
            row.append(*_ZONES[zone])
        rows.append(row)
    marks, labels = [" "] * axis.num_columns, ""
    for column, label in axis.ticks:
        marks[column] = "|"
        labels = labels.ljust(column) + label
    return [*rows, _line("", "".join(marks).rstrip(), "dim"), _line("", labels, "dim")]


def _line(label: str, text: str, style: str = "") -> Text:
    return Text(f"  {label:<{LABEL_COLUMNS - 3}} ", no_wrap=True, overflow="crop").append(text, style=style)


def _table(rows: tuple[tuple[str, ...], ...]) -> Padding:
    """Return a table whose first row is its heading and whose cells after the first are numbers."""
    table = Table.grid(padding=(0, 2))
    for index in range(len(rows[0])):
        table.add_column(justify="right" if index else "left", no_wrap=True)
    for index, row in enumerate(rows):
        table.add_row(*(Text(cell, style="" if index else "dim") for cell in row))
    return Padding(table, (0, 0, 0, 2))
