import torch

from autoprec.analysis import inspect_recording
from autoprec.analysis.storage_findings import STORAGE_CODES
from autoprec.capture import record
from tests.unit.analysis.workloads import ORDINARY, TIED, norms, ratio


def test_a_fault_is_marked_in_the_format_that_has_it_and_in_no_other() -> None:
    workload = ratio(1e-8, ORDINARY, TIED)
    inspection = inspect_recording(record(workload), workload, ("fp16", "bf16"), "cpu")
    assert [(str(mark.site), mark.format) for mark in inspection.marks if mark.verdict == "must"] == [
        (":add#0", "fp16")
    ]
    assert [finding.code for finding in inspection.findings if finding.severity == "error"] == ["guard_vanishes"]
    assert len(inspection.marks) == 2 * len(inspection.op_graph.sites())


def test_a_healthy_workload_has_no_fault() -> None:
    workload = norms()
    inspection = inspect_recording(record(workload), workload, ("fp16", "bf16"), "cpu")
    assert inspection.replay_matches
    assert all(mark.verdict != "must" for mark in inspection.marks)
    said = {finding.code for finding in inspection.findings if finding.severity != "note"}
    assert said <= STORAGE_CODES  # of formats that nobody asked to store anything in


def test_the_recording_is_left_as_it_was() -> None:
    workload = norms()
    recording = record(workload)
    before = {name: value.clone() for name, value in recording.model.named_parameters()}
    inspect_recording(recording, workload, ("fp16",), "cpu")
    after = dict(recording.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in recording.model.parameters())


def test_one_seed_says_the_same_twice() -> None:
    def said() -> object:
        workload = norms()
        inspection = inspect_recording(record(workload), workload, ("fp16", "bf16"), "cpu")
        return inspection.marks, [(each.code, each.site, each.fix) for each in inspection.findings]

    same = said() == said()
    assert same  # not compared in the assert: pytest would spend minutes on the difference of two large values
