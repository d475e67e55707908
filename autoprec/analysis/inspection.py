"""Everything the analyses say about one recorded step."""

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import constant_marks, lost_constants
from autoprec.analysis.findings import Finding, findings_of
from autoprec.analysis.forward_overflow import forward_overflows
from autoprec.analysis.loss_scale import GradientHistograms, LossScaleAdvice, loss_scale_advice, run_backward
from autoprec.analysis.marks import Mark, merge
from autoprec.analysis.single_site import broken_calls
from autoprec.analysis.storage import Storage, storage_of
from autoprec.capture import Recording
from autoprec.graph.opgraph import OpGraph
from autoprec.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of a workload without training it.

    `marks` holds one mark for each site and format, in order of first execution; `advice` one entry a format.
    """

    formats: tuple[str, ...]
    op_graph: OpGraph
    replay_matches: bool
    marks: tuple[Mark, ...]
    gradients: GradientHistograms
    advice: tuple[LossScaleAdvice, ...]
    storage: Storage
    findings: tuple[Finding, ...]


def inspect_recording(recording: Recording, workload: Workload, formats: Sequence[str], device_kind: str) -> Inspection:
    """Return what all analyses say; the recording and its model are left as they were.

    Costs one replay, one backward pass, what `storage_of` and `forward_overflows` cost, and up to three steps for each
    constant that is lost.
    """
    op_graph = recording.op_graph
    lost = lost_constants(op_graph, formats)
    replay_matches = recording.replay_matches
    marks = merge((*static_marks(op_graph, formats, device_kind), *constant_marks(lost, broken_calls(recording, lost))))
    gradients = run_backward((recording,))
    storage = storage_of((recording,), workload, formats)
    recording.model.zero_grad(set_to_none=True)
    overflows = forward_overflows((recording,), formats)
    advice = tuple(loss_scale_advice(gradients, name, overflows[name]) for name in formats)
    return Inspection(
        formats=tuple(formats),
        op_graph=op_graph,
        replay_matches=replay_matches,
        marks=marks,
        gradients=gradients,
        advice=advice,
        storage=storage,
        findings=findings_of(marks, advice, storage, replay_matches=replay_matches),
    )
