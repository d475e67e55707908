"""The mode whose model or loss code runs in each thread."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoprec.runtime.owned_mode import OwnedMode


class _Running(threading.local):
    def __init__(self) -> None:  # once a thread; a default of the class would change what torch.compile guards on
        self.mode: OwnedMode | None = None


RUNNING = _Running()
"""`RUNNING.mode` is that of the innermost model, where one runs inside another; None where no model runs."""
