"""What a guard reports, and where to."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from autoprec.errors import GuardError, OutputError

SCHEMA = 1
Reaction: TypeAlias = Literal["info", "warn", "promote", "fallback", "restore", "stop"]

_log = logging.getLogger("autoprec.guard")
_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "stop": logging.ERROR}


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardEvent:
    """What a detector found at a step, and what the guard did about it.

    `step` counts the calls of `guard.step`. `site` is a site, layer or parameter, empty where there is none at fault.
    `number` was measured, `threshold` is what it was held against; `advice` says what to do.
    """

    step: int
    detector: str
    reaction: Reaction
    message: str
    advice: str = ""
    site: str = ""
    number: float | None = None
    threshold: float | None = None
    rank: int = 0

    def __str__(self) -> str:
        place = f" at {self.site}" if self.site else ""
        held = (
            ""
            if self.number is None
            else f" ({self.number:.4g}" + (")" if self.threshold is None else f", threshold {self.threshold:.4g})")
        )
        return f"step {self.step}: {self.detector}{place}{held}: {self.reaction}: {self.message}" + (
            f"; {self.advice}" if self.advice else ""
        )

    def to_json(self) -> str:
        """Return the event as one line of JSON; numbers that are not finite are text."""
        plain = {name: _jsonable(value) for name, value in asdict(self).items()}
        return json.dumps({"schema": SCHEMA, **plain})


class Writer(Protocol):
    """What TensorBoard's `SummaryWriter` and its kin have."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Draw a number."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> Any:
        """Write a text."""


class Events:
    """Sends events to `logging` ("autoprec.guard"), a callable, a file of JSON lines and a TensorBoard writer.

    Only rank 0 writes file and board; every rank logs, and calls the callable. An exception of the callable or the
    writer is the user's own and ends the step that it is told of. A file that cannot be written any more is given up,
    with a line in the log: a full disk is no reason to end a run.

    Raises: `OutputError` if the file cannot be opened, `GuardError` for what is no callable or writer.
    """

    def __init__(
        self,
        *,
        on_event: Callable[[GuardEvent], object] | None = None,
        file: str | PathLike[str] | None = None,
        tensorboard: Writer | None = None,
        rank: int = 0,
    ) -> None:
        _check(on_event, tensorboard)
        self._on_event = on_event
        self._file = None if file is None or rank else Path(file)
        self._board = None if rank else tensorboard
        if self._file is not None:
            try:
                self._file.open("a", encoding="utf-8").close()
            except OSError as error:
                raise OutputError(
                    f"guard: events cannot be written to {self._file}: {error.strerror or error}; name another file"
                ) from error

    def send(self, event: GuardEvent) -> None:
        """Report one event."""
        _log.log(_LEVELS.get(event.reaction, logging.WARNING), "%s", event)
        self._write(event)
        if self._board is not None:
            self._board.add_text("guard/events", str(event), event.step)
            if event.number is not None:
                self._board.add_scalar(f"guard/{event.detector}", event.number, event.step)
        if self._on_event is not None:
            self._on_event(event)

    def draw(self, numbers: Sequence[tuple[str, float]], step: int) -> None:
        """Draw what was sampled at a step."""
        if self._board is not None:
            for name, number in numbers:
                self._board.add_scalar(f"guard/{name}", number, step)

    def _write(self, event: GuardEvent) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(event.to_json() + "\n")
        except OSError as error:
            _log.error("events are written to %s no more: %s", self._file, error)
            self._file = None


def _check(on_event: object, tensorboard: object) -> None:
    if on_event is not None and not callable(on_event):
        raise GuardError(f"guard: on_event is {on_event!r}; allowed: a function that takes an autoprec.GuardEvent")
    if tensorboard is not None and not (hasattr(tensorboard, "add_scalar") and hasattr(tensorboard, "add_text")):
        raise GuardError(
            f"guard: tensorboard is {tensorboard!r}; allowed: an object with add_scalar and add_text, such as "
            "torch.utils.tensorboard.SummaryWriter(folder)"
        )


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
