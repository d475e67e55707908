"""Measuring real training: runs of a workload under a policy, their step times, their memory, their fidelity to FP32.

Everything here trains or times on the device at hand and returns values; what a good value is, search decides.
"""

from autoprec.measure.deadline import StepTooSlow, step_deadline
from autoprec.measure.energy import Energy, energy_meter
from autoprec.measure.fidelity import Fidelity, compare, hopeless
from autoprec.measure.memory import MemoryUse, measure_memory
from autoprec.measure.step_time import Ratio, interleave, interleave_until, speedup
from autoprec.measure.steps_lost import Trend
from autoprec.measure.traced import trace_policy
from autoprec.measure.training import Training

__all__ = [
    "Energy",
    "Fidelity",
    "MemoryUse",
    "Ratio",
    "StepTooSlow",
    "Training",
    "Trend",
    "compare",
    "energy_meter",
    "hopeless",
    "interleave",
    "interleave_until",
    "measure_memory",
    "speedup",
    "step_deadline",
    "trace_policy",
]
