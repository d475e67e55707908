"""What a run tells whoever watches: nothing, unless a subclass listens."""

from typing import Self

from autoprec.records.run import TrialRecord


class Observer:
    """Receives the progress of a run and does nothing with it. A context: it is closed however the run ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stage(self, name: str, *, budget_s: float | None = None) -> None:
        """Note that a part of the run begins; `budget_s` is how long the whole run has left, None: until it is done."""

    def trial_begins(self, name: str, number: int) -> None:
        """Note that a trial begins."""

    def round_ends(self, done_frac: float, ratio: float) -> None:
        """Note that a trial has done `done_frac` of its steps at `ratio` times the FP32 step time."""

    def trial_ends(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Note a finished trial and the fastest faithful one so far."""

    def note(self, text: str) -> None:
        """Note something a user should read."""

    def close(self) -> None:
        """Note that the run is over, however it ended."""
