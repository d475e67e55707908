"""What a policy really runs in a workload: one traced step on its first batch."""

from autoprec.measure.training import Training
from autoprec.policy import Policy
from autoprec.runtime.trace import Trace
from autoprec.workload import Workload, load_batches


def trace_policy(workload: Workload, policy: Policy | str, *, device: str, seed: int = 0) -> Trace:
    """Return in which formats the kernels of the first training step of `workload` run under `policy`.

    Raises: `TraceError` if the model holds compiled modules; whatever loading and applying raise.
    """
    with Training(workload, policy, device=device, seed=seed, batches=load_batches(workload, 1, device)) as training:
        return training.trace()
