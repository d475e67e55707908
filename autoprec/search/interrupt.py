"""Ctrl-C and SIGTERM: told apart from errors while a run goes on, and held off while its result is written."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM inside the block, which must be short: a result is written whole or not at all."""
    with _handled(signal.SIGINT, signal.SIG_IGN), _handled(signal.SIGTERM, signal.SIG_IGN):
        yield


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at SIGTERM, which schedulers and containers end a run with, as at Ctrl-C."""
    with _handled(signal.SIGTERM, signal.default_int_handler):
        yield


@contextmanager
def _handled(number: signal.Signals, handler: _Handler) -> Iterator[None]:
    """Handle a signal so inside the block; Python lets the main thread alone do that, others go without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)
