"""The guard: watches a training run under a policy, and reacts before trust is lost.

Part of the production door: torch and PyYAML and nothing else.
"""

from autoprec.runtime.guard.calibration import Calibration, calibration_of
from autoprec.runtime.guard.detectors import DETECTORS
from autoprec.runtime.guard.events import GuardEvent
from autoprec.runtime.guard.guarded_loop import Guard
from autoprec.runtime.guard.install import REACTIONS, guard
from autoprec.runtime.guard.limits import GuardLimits
from autoprec.runtime.guard.outcome import GuardOutcome

__all__ = [
    "DETECTORS",
    "REACTIONS",
    "Calibration",
    "Guard",
    "GuardEvent",
    "GuardLimits",
    "GuardOutcome",
    "calibration_of",
    "guard",
]
