"""Everything the analyses say about one recorded step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoprec.analysis.build_up import error_of_fp32
from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import constant_marks, lost_constants
from autoprec.analysis.diagnosis import MOST_STEPS, Diagnosis, diagnose, diagnosis_marks
from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.findings import Finding, findings_of
from autoprec.analysis.loss_scale import (
    GradientHistograms,
    LossScaleAdvice,
    largest_scale,
    loss_scale_advice,
    run_backward,
)
from autoprec.analysis.low_step import Reference, low_format, reference_of
from autoprec.analysis.marks import Mark, merge
from autoprec.analysis.measured import MeasuredNumerics, measured_numerics
from autoprec.analysis.patterns import explanations, pattern_marks
from autoprec.analysis.ranges import ranges_of
from autoprec.analysis.static import static_analysis
from autoprec.analysis.storage import Storage, storage_of
from autoprec.capture import Recording
from autoprec.errors import WorkloadError
from autoprec.graph.opgraph import OpGraph
from autoprec.numerics import FORMATS, Format, format_named
from autoprec.policy import FLOAT8
from autoprec.runtime.device import DeviceInfo
from autoprec.workload.workload import Workload

# Runs start at 2**16 and settle at 2**10 and more; what a run needs less for has an outlier inside.
_USEFUL_SCALE = 2.0**10
_GRADIENTS_ONLY = frozenset({"fp8_e5m2"})  # matmuls in FP8 round gradients to it; no site has it as its format


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of a workload without training it.

    `marks` holds one mark for each site and format, in order of first execution; `diagnoses` and `advice` one entry a
    format, but for formats that no site can run in `diagnoses`. `op_graph` is that of the first batch.
    `fp32_error` is that of the first batch's FP32 gradient against FP64's, NaN where FP64 does not run.
    Where nothing was run to know them, `replay_matches`, `fp32_error`, `gradients` and `storage` are None, and
    `diagnoses` and `advice` are empty.
    """

    formats: tuple[str, ...]
    op_graph: OpGraph
    num_batches: int
    replay_matches: bool | None
    fp32_error: float | None
    marks: tuple[Mark, ...]
    diagnoses: tuple[Diagnosis, ...]
    gradients: GradientHistograms | None
    advice: tuple[LossScaleAdvice, ...]
    storage: Storage | None
    findings: tuple[Finding, ...]
    numerics: MeasuredNumerics = field(default_factory=MeasuredNumerics)


def inspect_recordings(
    recordings: Sequence[Recording],
    workload: Workload,
    formats: Sequence[str],
    device: DeviceInfo,
    *,
    max_steps: int = MOST_STEPS,
) -> Inspection:
    """Return what all analyses say of recorded steps of one model; recordings and model are left as they were.

    Costs what `storage_of` costs, about five steps a batch, and where a format breaks the step, up to `max_steps` to
    find out where.
    """
    first = recordings[0]
    op_graph = first.op_graph
    numerics = measured_numerics(recordings, workload.optimizer, formats)
    takes_gradients = any(node.op == "grad" for node in op_graph)  # of their own inside the loss, seen one by one
    gradients = run_backward(recordings) if takes_gradients else numerics.gradients()
    storage = storage_of(recordings, workload, formats)
    first.model.zero_grad(set_to_none=True)
    references = [reference_of(recording) for recording in recordings]
    for reference in references:
        _check_finite(reference)
    diagnoses = tuple(
        _diagnosed(name, references, gradients, device, max_steps) for name in formats if name not in _GRADIENTS_ONLY
    )
    overflows = {each.format: each.overflow_origins for each in diagnoses}
    advice = tuple(loss_scale_advice(gradients, name, overflows.get(name, ())) for name in formats)
    found = [mark for diagnosis in diagnoses for mark in diagnosis_marks(diagnosis)]
    broken = {(mark.site, mark.format) for mark in found}
    patterns = pattern_marks(op_graph, formats, ranges_of(op_graph, extremes_of(first)), device_kind=device.kind)
    patterns = tuple(mark for mark in patterns if (mark.site, mark.format) in broken)
    marks = merge(
        (
            *found,
            *patterns,
            *static_marks(op_graph, formats, device.kind),
            *constant_marks(lost_constants(op_graph, formats)),
        )
    )
    fp32_error = error_of_fp32(references[0])
    replay_matches = first.replay_matches
    return Inspection(
        formats=tuple(formats),
        op_graph=op_graph,
        num_batches=len(recordings),
        fp32_error=fp32_error,
        replay_matches=replay_matches,
        marks=marks,
        diagnoses=diagnoses,
        gradients=gradients,
        advice=advice,
        storage=storage,
        numerics=numerics,
        findings=findings_of(
            marks,
            diagnoses,
            advice,
            storage,
            replay_matches=replay_matches,
            explained=explanations(patterns),
            fp32_error=fp32_error,
        ),
    )


def _diagnosed(
    name: str, references: Sequence[Reference], gradients: GradientHistograms, device: DeviceInfo, max_steps: int
) -> Diagnosis:
    fmt = low_format(name, device.kind, device.native_formats)
    row = format_named(name)
    if row.exponent_bits >= FORMATS["fp32"].exponent_bits or name == FLOAT8:  # such runs have no loss scale
        return diagnose(references, fmt, max_steps=max_steps)
    least = _least_scale(row, gradients)
    # The scale is itself the gradient that a low loss hands down first.
    largest = math.ldexp(1.0, row.max_exponent)
    scale = min(max(loss_scale_advice(gradients, name).initial, least), largest)
    return diagnose(references, fmt, loss_scale=scale, least_scale=least, max_steps=max_steps)


def _least_scale(low: Format, gradients: GradientHistograms) -> float:
    """Return the loss scale below which a run is taken for broken: `_USEFUL_SCALE`, if weight gradients can take it.

    Where they can and something inside of the backward pass cannot, that is a fault of a site, not of the scale.
    """
    largest = max((each.max_abs for each in gradients.parameters.values()), default=0.0)
    return max(min(largest_scale(largest, low), _USEFUL_SCALE), 1.0)


def _check_finite(reference: Reference) -> None:
    """Raise `WorkloadError` if the step is broken in FP32 already."""
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


def inspect_static(recording: Recording, formats: Sequence[str], device_kind: str) -> Inspection:
    """Return what graph, constants and the recorded batch say, without running anything again."""
    found = static_analysis(recording.op_graph, formats, device_kind, extremes_of(recording))
    return Inspection(
        formats=tuple(formats),
        op_graph=recording.op_graph,
        num_batches=1,
        fp32_error=None,
        replay_matches=None,
        marks=found.marks,
        diagnoses=(),
        gradients=None,
        advice=(),
        storage=None,
        findings=found.findings,
    )
