import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autoprec.analysis import Inspection, inspect_recordings
from autoprec.analysis.storage_findings import STORAGE_CODES
from autoprec.capture import Recording, record_batches
from autoprec.errors import WorkloadError
from autoprec.report.inspect_json import inspect_json
from autoprec.runtime.device import describe
from autoprec.workload import Workload
from tests.unit.analysis.recorded import workload
from tests.unit.analysis.workloads import ORDINARY, TIED, norms, ratio

BOTH = ("fp16", "bf16")


def inspected(
    workload: Workload, formats: Sequence[str] = BOTH, recordings: Sequence[Recording] = (), num_batches: int = 1
) -> Inspection:
    recordings = recordings or record_batches(workload, num_batches)
    return inspect_recordings(recordings, workload, formats, describe("cpu"))


def musts(inspection: Inspection) -> list[tuple[str, str]]:
    return [(str(mark.site), mark.format) for mark in inspection.marks if mark.verdict == "must"]


def test_a_fault_is_marked_in_the_format_that_has_it_and_in_no_other() -> None:
    inspection = inspected(ratio(1e-8, ORDINARY, TIED))
    assert musts(inspection) == [(":add#0", "fp16"), (":div#0", "fp16")]
    errors = [finding for finding in inspection.findings if finding.severity == "error"]
    assert [(each.code, each.site) for each in errors] == [("underflow", ":add#0")]  # one, where it begins
    assert len(inspection.marks) == 2 * len(inspection.op_graph.sites())
    assert [each.format for each in inspection.diagnoses] == ["fp16", "bf16"]
    assert [each.repair is not None for each in inspection.diagnoses] == [True, False]


def test_the_lost_constant_is_told_beside_the_fault() -> None:
    (add,) = [
        mark for mark in inspected(ratio(1e-8, ORDINARY, TIED), ("fp16",)).marks if str(mark.site) == ":add#0"
    ]  # fmt: skip
    (constant,) = [reason for reason in add.reasons if reason.code.value == "guard_vanishes"]
    assert constant.evidence["constant"] == 1e-8


def test_a_healthy_workload_has_no_fault() -> None:
    inspection = inspected(norms())
    assert inspection.replay_matches
    assert all(mark.verdict != "must" for mark in inspection.marks)
    said = {finding.code for finding in inspection.findings if finding.severity != "note"}
    assert said <= STORAGE_CODES  # of formats that nobody asked to store anything in


def test_a_fault_on_a_later_batch_is_found_if_it_is_looked_at() -> None:
    def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * net.gain).square().mean().sqrt()

    late = workload(loss, torch.ones(4), torch.full((4,), 300.0), gain=torch.ones(4))
    assert musts(inspected(late)) == []
    found = inspected(late, num_batches=2)
    assert {fmt for _, fmt in musts(found)} == {"fp16"}
    assert (":square#0", "fp16") in musts(found)
    assert (found.num_batches, found.diagnoses[0].check.batch) == (2, 1)


def test_a_loss_scale_goes_with_the_formats_that_have_fewer_exponents() -> None:
    def small(net: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x * net.gain).square() * 1e-6).sum()

    inspection = inspected(workload(small, torch.ones(4) / 8, gain=torch.ones(4)))
    fp16, bf16 = inspection.diagnoses
    assert fp16.check.damage.loss_scale == inspection.advice[0].initial > 1024
    assert bf16.check.damage.loss_scale == 1.0
    assert musts(inspection) == []


def test_gradients_that_are_not_finite_in_fp32_are_refused_by_name() -> None:
    def masked(net: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, (x * net.gain).sqrt(), x * 0).sum() + (net.shift * x).sum()

    broken = workload(masked, torch.tensor([0.0, 1.0]), gain=torch.ones(2), shift=torch.ones(2))
    with pytest.raises(
        WorkloadError, match=r'not, in FP32 already: that of 1 parameters, such as "gain"; .*behind a mask'
    ):
        inspected(broken)


def test_fp8_gradient_formats_have_advice_and_no_diagnosis() -> None:
    inspection = inspected(norms(), ("bf16", "fp8_e5m2"))
    assert [each.format for each in inspection.advice] == ["bf16", "fp8_e5m2"]
    assert [each.format for each in inspection.diagnoses] == ["bf16"]


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_everything_can_be_written_as_json(eps: float) -> None:
    found = inspect_json(inspected(ratio(eps, ORDINARY, TIED)), workload="ratio", device={"kind": "cpu"})
    text = json.dumps(found, allow_nan=False)
    assert "NaN" not in text
    assert "Infinity" not in text


def test_the_recording_is_left_as_it_was() -> None:
    workload = norms()
    recordings = record_batches(workload, 1)
    model = recordings[0].model
    before = {name: value.clone() for name, value in model.named_parameters()}
    inspected(workload, ("fp16",), recordings)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_seed_says_the_same_twice() -> None:
    def said() -> object:
        inspection = inspected(norms())
        return inspection.marks, [(each.code, each.site, each.fix) for each in inspection.findings]

    same = said() == said()
    assert same  # not compared in the assert: pytest would spend minutes on the difference of two large values


def test_a_model_that_is_stored_low_may_stay_there() -> None:
    def product(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * net.gain.float()).square().mean()

    low = workload(product, torch.ones(4), gain=torch.ones(4, dtype=torch.bfloat16))
    (note,) = [each for each in inspected(low, ("bf16",)).findings if each.code == "trained_low"]
    assert (note.severity, note.names) == ("note", ("gain",))
    assert "may be right to stay there" in note.fix
    assert not [each for each in inspected(norms()).findings if each.code == "trained_low"]


def test_an_empty_batch_is_refused_as_such() -> None:
    def scaled(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * net.gain).sum()

    with pytest.raises(
        WorkloadError, match=r"a batch is empty: none of its tensors holds an element, .* leave such batches"
    ):
        inspected(workload(scaled, torch.ones(0), gain=torch.ones(1)))


def test_an_outlier_inside_the_backward_pass_is_the_fault_of_a_site_and_not_of_the_loss_scale() -> None:
    def spiked(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * net.gain * 300).sum()

    # The gradient of the product is 300: a loss scale of 2**10 takes it beyond fp16. That of the gain is 300 x.
    inside = inspected(workload(spiked, torch.full((4,), 1e-4), gain=torch.ones(4)), ("fp16",))
    assert (":mul#0", "fp16") in musts(inside)
    weights = inspected(workload(spiked, torch.ones(4), gain=torch.ones(4)), ("fp16",))  # they ask for a smaller scale
    assert musts(weights) == []
    assert weights.diagnoses[0].check.damage.loss_scale < 2**10
