"""Progress on stderr while a run goes on: time left, the trial at hand, the best so far."""

import time

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from autoprec.records.run import TrialRecord
from autoprec.report.views import best_line, trial_line
from autoprec.search.duration import format_duration
from autoprec.search.observer import Observer

_REFRESH_S = 0.2


class RichObserver(Observer):
    """Shows a run on a terminal as one live line, elsewhere as a plain line for each stage and trial."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._budget_s: float | None = None
        self._stage, self._trial, self._best = "", "", ""
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[left]}")
        )
        self._task: TaskID = self._bar.add_task("", total=1.0, left="")
        self._live = Live(
            get_renderable=self._render, console=console, transient=True, refresh_per_second=1 / _REFRESH_S
        )

    def stage(self, name: str, *, budget_s: float | None = None) -> None:
        """Show the part of the run that begins."""
        self._budget_s = budget_s or self._budget_s
        self._stage, self._trial = name, ""
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(Text(f"{name} ({self._left()})" if self._left() else name))

    def trial_begins(self, name: str, number: int) -> None:
        """Show which trial is measured."""
        self._trial = f"trial {number}: {name}"

    def round_ends(self, done_frac: float, ratio: float) -> None:
        """Show how far the trial is and how it does against FP32."""
        name = self._trial.partition(",")[0]
        self._trial = f"{name}, {100 * min(done_frac, 1):.0f} %, {1 / ratio:.2f}x fp32"

    def trial_ends(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Keep the best so far in view; off a terminal, print what a new policy gave."""
        self._trial = ""
        self._best = "" if best is None else best_line(best)
        if not self._console.is_terminal and record.state != "duplicate":
            self._console.print(Text(trial_line(record)))

    def note(self, text: str) -> None:
        """Print what a user should read."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Take the live line away."""
        self._live.stop()

    def _left(self) -> str:
        if self._budget_s is None:
            return ""
        left = self._budget_s - (time.monotonic() - self._started)
        return f"{format_duration(left)} left" if left > 0 else "finishing"

    def _render(self) -> Table:
        elapsed = time.monotonic() - self._started
        done = min(elapsed / self._budget_s, 1.0) if self._budget_s else 0.0
        self._bar.update(self._task, completed=done, description=self._stage, left=self._left())
        grid = Table.grid(padding=(0, 2))
        grid.add_row(self._bar.get_renderable(), Text(self._trial), Text(self._best, style="bold"))
        return grid
