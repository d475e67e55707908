"""Parameters whose gradient this device's kernels get wrong in a format, while the format itself would get it right.

Everything runs low twice: with ideal kernels, which round the operands and compute in FP32, and with the device's. What
both get wrong is rounding; what only the device's get wrong is a kernel that sums in the low format. Errors are taken
parameter by parameter: one wrong bias is a thousandth of the whole gradient.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autoprec.analysis.deadline import NEVER, Deadline
from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import Gradients, LowReplay, Reference, gradients_of, relative_error
from autoprec.graph.site import Site
from autoprec.graph.uses import uses_of

# A gradient that is wrong by a fifth is no gradient of this loss any more.
WRONG = 0.2
# What separates a kernel's fault from rounding: chaotic gradients differ about as much under both.
_TIMES_IDEAL = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFault:
    """A site whose kernels on this device get the gradient of `parameter` wrong in the format.

    `error` is the relative error of that gradient with everything low, `ideal_error` with ideal kernels, and `alone`
    with only this site low. `numel` counts the elements of the largest tensor that the site reads.
    """

    site: Site
    format: str
    parameter: str
    error: float
    ideal_error: float
    alone: float
    numel: int


def kernel_faults(
    reference: Reference, fmt: LowFormat, sites: Sequence[Site], loss_scale: float, deadline: Deadline = NEVER
) -> tuple[KernelFault, ...]:
    """Return the faults of the device's kernels, each confirmed by a step with only its site low.

    Costs two steps, and two for each parameter that is wrong, up to the deadline. Empty where a step is not finite:
    then there is no gradient to compare.
    """
    device = _gradients(reference, fmt, frozenset(sites), loss_scale)
    ideal = _gradients(reference, replace(fmt, kernels="ideal"), frozenset(sites), loss_scale)
    if device is None or ideal is None:
        return ()
    suspects = _suspects(reference, device, ideal)
    return tuple(_confirmed(reference, fmt, suspects, sites, loss_scale, deadline))


def _suspects(reference: Reference, device: Gradients, ideal: Gradients) -> dict[str, tuple[float, float]]:
    """Return the errors of the parameters that only the device's kernels get wrong, by name."""
    found = {}
    for index, name in enumerate(_names(reference)):
        error, ideal_error = (relative_error([each[index]], [reference.gradients[index]]) for each in (device, ideal))
        if _is_kernels_fault(error, ideal_error):
            found[name] = (error, ideal_error)
    return found


def _is_kernels_fault(error: float, ideal_error: float) -> bool:
    """Return whether only the device is wrong. A gradient that is 0 but for rounding no kernel gets right."""
    return ideal_error <= WRONG and error > max(WRONG, _TIMES_IDEAL * ideal_error)


def _confirmed(
    reference: Reference,
    fmt: LowFormat,
    suspects: Mapping[str, tuple[float, float]],
    sites: Sequence[Site],
    loss_scale: float,
    deadline: Deadline,
) -> Iterator[KernelFault]:
    graph = reference.recording.op_graph
    readers, names = uses_of(graph).parameters, _names(reference)
    for name, (error, ideal_error) in suspects.items():
        for site in readers.get(name, ()):
            if site not in set(sites) or deadline.is_over:
                continue
            alone, ideal_alone = (
                _alone(reference, each, site, names.index(name), loss_scale)
                for each in (fmt, replace(fmt, kernels="ideal"))
            )
            if math.isfinite(alone) and _is_kernels_fault(alone, ideal_alone):
                numel = max(meta.numel for node in graph.calls_of(site) for meta in node.inputs)
                yield KernelFault(
                    site=site, format=fmt.name, parameter=name, error=error, ideal_error=ideal_error, alone=alone,
                    numel=numel,
                )  # fmt: skip


def _alone(reference: Reference, fmt: LowFormat, site: Site, index: int, loss_scale: float) -> float:
    """Return the error of one parameter's gradient with only `site` low."""
    only = frozenset({site})
    gradients = _gradients(reference, fmt, only, loss_scale, forced=only)
    return math.inf if gradients is None else relative_error([gradients[index]], [reference.gradients[index]])


def _gradients(
    reference: Reference,
    fmt: LowFormat,
    low: frozenset[Site],
    loss_scale: float,
    forced: frozenset[Site] = frozenset(),
) -> Gradients | None:
    """Return the gradients of a low step; None if it fails or anything is not finite."""
    try:
        loss = LowReplay(reference.recording, fmt, low, forced=forced).loss()
        gradients = gradients_of(loss, reference.recording, loss_scale)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    finite = all(bool(torch.isfinite(each).all()) for each in gradients if each is not None)
    return gradients if finite and bool(loss.isfinite()) else None


def _names(reference: Reference) -> list[str]:
    return [name for name, each in reference.recording.model.named_parameters() if each.requires_grad]
