"""What commands that run a workload do around it."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Run a workload: what it prints goes to stderr, and what is loaded by now stays out of garbage collections.

    A collection that looks through torch takes a quarter of a second, and a trial makes several.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    with contextlib.redirect_stdout(sys.stderr):
        yield
