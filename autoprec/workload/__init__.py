"""The workload: the training run that is tuned, where it is loaded from, and its batches.

Importing this package loads no torch; the functions that need it import it when they are called.
"""

from autoprec.workload.batches import load_batches, to_device
from autoprec.workload.later_batches import batches_after, fitting_batches
from autoprec.workload.load import LoadedWorkload, load
from autoprec.workload.workload import Workload

__all__ = [
    "LoadedWorkload",
    "Workload",
    "batches_after",
    "fitting_batches",
    "load",
    "load_batches",
    "to_device",
]
