"""Recording: one training step of a workload as an executable `torch.fx` graph and as an op graph."""

from autoprec.capture.recording import Recording, Replay, attribute_name, record, record_batches
from autoprec.capture.reproduce import require_reproducible

__all__ = ["Recording", "Replay", "attribute_name", "record", "record_batches", "require_reproducible"]
