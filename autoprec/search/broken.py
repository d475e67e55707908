"""Workloads that are broken before any precision is lowered: the loss is not finite, and an op is to blame."""

import math

from autoprec.analysis.finite import first_non_finite, with_state
from autoprec.capture import Recording, record
from autoprec.errors import WorkloadError
from autoprec.policy import preset
from autoprec.search.objective import Protocol


def check_first_loss(recording: Recording) -> None:
    """Return if the recorded loss is finite.

    Raises: `WorkloadError` that names the op where it stops to be.
    """
    if not math.isfinite(recording.loss):
        raise WorkloadError(broken_text(recording.loss, 1, str(first_non_finite(recording))))


def broken_text(loss: float, step: int, origin: str) -> str:
    """Return what is wrong with a workload whose FP32 loss is not finite at `step`, and what to do."""
    return (
        f"the loss is {loss} at step {step} in plain FP32: {origin}; the workload is broken before any precision is "
        "lowered: fix it (learning rate, data, a division or a log of zero) and tune then"
    )


def origin_at(protocol: Protocol, step: int) -> str:
    """Return where the fault of step `step`, counted from 0, starts: from a replay with its weights and its batch."""
    with protocol.train(preset("fp32", protocol.device)) as run:
        for _ in range(step):
            run.step()
        state = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    recording = record(protocol.workload, device=protocol.device, seed=protocol.seed)
    try:
        origin = first_non_finite(with_state(recording, state, protocol.batches[step % len(protocol.batches)]))
    except RuntimeError as error:  # the graph of the first step does not fit the batch of this one
        return f"the op cannot be named, as the recorded step does not run on this batch ({error})"
    return "no op shows it in a replay" if origin is None else str(origin)
