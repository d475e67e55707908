"""The mode whose model or loss code runs in each thread."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoprec.runtime.owned_mode import OwnedMode


class _Running(threading.local):
    def __init__(self) -> None:
        self.mode: OwnedMode | None = None  # of the instance: torch.compile guards on whether it is there


RUNNING = _Running()
"""`RUNNING.mode` is that of the innermost model, where one runs inside another; None where no model runs."""
