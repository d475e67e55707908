"""The marks of recorded steps: what running them low shows, beside what classes, constants and patterns say."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import constant_marks, lost_constants
from autoprec.analysis.deadline import NEVER, Deadline
from autoprec.analysis.diagnosis import MOST_STEPS, Diagnosis, diagnose, diagnosis_marks
from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.loss_scale import GradientHistograms, largest_scale, loss_scale_advice
from autoprec.analysis.low_format import Kernels, LowFormat, low_format
from autoprec.analysis.low_step import Reference, reference_of
from autoprec.analysis.marks import Mark, merge
from autoprec.analysis.patterns import pattern_marks
from autoprec.analysis.ranges import ranges_of
from autoprec.capture import Recording
from autoprec.errors import WorkloadError
from autoprec.numerics import FORMATS, Format, format_named
from autoprec.policy import FLOAT8
from autoprec.runtime.device import DeviceInfo

# Runs start at 2**16 and settle at 2**10 and more; what a run needs less for has an outlier inside.
_USEFUL_SCALE = 2.0**10
_GRADIENTS_ONLY = frozenset({"fp8_e5m2"})  # matmuls in FP8 round gradients to it; no site has it as its format


@dataclass(frozen=True, kw_only=True)
class Marking:
    """One mark for each site and format, in order of execution; the diagnoses behind them, one a format.

    `patterns` are those that the graph shows at sites that break. `references` are the FP32 steps, one a recording.
    `left_out` says what the deadline did, one text each.
    """

    marks: tuple[Mark, ...]
    diagnoses: tuple[Diagnosis, ...]
    patterns: tuple[Mark, ...]
    references: tuple[Reference, ...]
    left_out: tuple[str, ...] = ()


def mark_recordings(
    recordings: Sequence[Recording],
    formats: Sequence[str],
    device: DeviceInfo,
    gradients: GradientHistograms,
    max_steps: int = MOST_STEPS,
    kernels: Kernels = "device",
    deadline: Deadline = NEVER,
) -> Marking:
    """Return the marks of recorded steps of one model, whose FP32 gradients are known.

    With ideal kernels the marks are about the formats alone, whatever device computes them.
    Costs about five steps a batch, and where a format breaks the step, up to `max_steps` to find out where. At the
    deadline it ends with what is known by then.

    Raises: `WorkloadError` if a gradient is not finite in FP32 already, or if a batch is empty.
    """
    references = tuple(reference_of(recording) for recording in recordings)
    for reference in references:
        _check_finite(reference)
    diagnoses: list[Diagnosis] = []
    left_out: list[str] = []
    for name in (each for each in formats if each not in _GRADIENTS_ONLY):
        if deadline.is_over:
            left_out.append(f"{name}: what it breaks; the classes of ops say what stays in fp32")
            continue
        fmt = low_format(name, device.kind, device.native_formats, kernels)
        diagnoses.append(_diagnosed(fmt, references, gradients, max_steps, deadline))
        left_out.extend(diagnoses[-1].left_out)
    op_graph = recordings[0].op_graph
    found = [mark for diagnosis in diagnoses for mark in diagnosis_marks(diagnosis)]
    broken = {(mark.site, mark.format) for mark in found}
    ranges = ranges_of(op_graph, extremes_of(recordings[0])) if broken else {}
    patterns = pattern_marks(op_graph, formats, ranges, device_kind=device.kind) if broken else ()
    patterns = tuple(mark for mark in patterns if (mark.site, mark.format) in broken)
    default = static_marks(op_graph, formats, device.kind)
    constants = constant_marks(lost_constants(op_graph, formats))
    order = {site: index for index, site in enumerate(op_graph.sites())}
    marks = merge((*found, *patterns, *default, *constants))
    return Marking(
        marks=tuple(sorted(marks, key=lambda mark: order.get(mark.site, len(order)))),
        diagnoses=tuple(diagnoses),
        patterns=patterns,
        references=references,
        left_out=tuple(left_out),
    )


def _diagnosed(
    fmt: LowFormat,
    references: Sequence[Reference],
    gradients: GradientHistograms,
    max_steps: int,
    deadline: Deadline,
) -> Diagnosis:
    row = format_named(fmt.name)
    if row.exponent_bits >= FORMATS["fp32"].exponent_bits or fmt.name == FLOAT8:  # such runs have no loss scale
        return diagnose(references, fmt, max_steps=max_steps, deadline=deadline)
    least = _least_scale(row, gradients)
    # The scale is itself the gradient that a low loss hands down first.
    largest = math.ldexp(1.0, row.max_exponent)
    scale = min(max(loss_scale_advice(gradients, fmt.name).initial, least), largest)
    return diagnose(references, fmt, loss_scale=scale, least_scale=least, max_steps=max_steps, deadline=deadline)


def _least_scale(low: Format, gradients: GradientHistograms) -> float:
    """Return the loss scale below which a run is taken for broken: `_USEFUL_SCALE`, if weight gradients can take it.

    Where they can and something inside of the backward pass cannot, that is a fault of a site, not of the scale.
    """
    largest = max((each.max_abs for each in gradients.parameters.values()), default=0.0)
    return max(min(largest_scale(largest, low), _USEFUL_SCALE), 1.0)


def _check_finite(reference: Reference) -> None:
    """Raise `WorkloadError` if the step is broken in FP32 already, or has nothing to look at."""
    inputs = reference.recording.inputs
    if inputs and all(tensor.numel() == 0 for tensor in inputs):
        raise WorkloadError(
            "a batch is empty: none of its tensors holds an element, so nothing can be said of any format; "
            "let batches() leave such batches out"
        )
    named = [name for name, each in reference.recording.model.named_parameters() if each.requires_grad]
    found = [
        name
        for name, each in zip(named, reference.gradients, strict=True)
        if each is not None and not each.isfinite().all()
    ]
    if found:
        raise WorkloadError(
            f"the loss is finite and the gradient is not, in FP32 already: that of {len(found)} parameters, such as "
            f'"{found[0]}"; precision is not the fault: look for a sqrt, log or division at 0 behind a mask'
        )
