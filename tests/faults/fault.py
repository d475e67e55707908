"""A planted fault: something wrong with a policy, a workload or a run, and the gate or detector meant to catch it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault.

    `planted` says what is wrong. `run` plants it in an empty folder and returns the names of what fired: the gates that
    failed, the detectors that reported. A fault is caught where `meant_for` is among them.
    """

    name: str
    planted: str
    meant_for: str
    run: Callable[[Path], frozenset[str]]
