"""A time by which an analysis ends with what it knows by then."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """A time of the clock `now`. *Units*: seconds."""

    at: float = math.inf
    now: Callable[[], float] = time.monotonic

    @property
    def is_over(self) -> bool:
        """Return whether the time has come."""
        return self.now() >= self.at


NEVER = Deadline()


def after(seconds: float, now: Callable[[], float] = time.monotonic) -> Deadline:
    """Return the deadline in so many seconds."""
    return Deadline(at=now() + seconds, now=now)
