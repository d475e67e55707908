"""Everything the analyses say about one recorded step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autoprec.analysis.build_up import error_of_fp32
from autoprec.analysis.diagnosis import MOST_STEPS, Diagnosis
from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.findings import Finding, findings_of
from autoprec.analysis.loss_scale import (
    GradientHistograms,
    LossScaleAdvice,
    loss_scale_advice,
    run_backward,
)
from autoprec.analysis.marking import mark_recordings
from autoprec.analysis.marks import Mark
from autoprec.analysis.measured import MeasuredNumerics, measured_numerics
from autoprec.analysis.patterns import explanations
from autoprec.analysis.static import static_analysis
from autoprec.analysis.storage import Storage, storage_of
from autoprec.capture import Recording
from autoprec.graph.opgraph import OpGraph
from autoprec.runtime.device import DeviceInfo
from autoprec.workload.workload import Workload

_LOW = (torch.float16, torch.bfloat16)


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
    marking = mark_recordings(recordings, formats, device, gradients, max_steps)
    overflows = {each.format: each.overflow_origins for each in marking.diagnoses}
    advice = tuple(loss_scale_advice(gradients, name, overflows.get(name, ())) for name in formats)
    fp32_error = error_of_fp32(marking.references[0])
    replay_matches = first.replay_matches
    return Inspection(
        formats=tuple(formats),
        op_graph=op_graph,
        num_batches=len(recordings),
        fp32_error=fp32_error,
        replay_matches=replay_matches,
        marks=marking.marks,
        diagnoses=marking.diagnoses,
        gradients=gradients,
        advice=advice,
        storage=storage,
        numerics=numerics,
        findings=findings_of(
            marking.marks,
            marking.diagnoses,
            advice,
            storage,
            replay_matches=replay_matches,
            explained=explanations(marking.patterns),
            fp32_error=fp32_error,
            trained_low=[name for name, each in first.model.named_parameters() if each.dtype in _LOW],
        ),
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
