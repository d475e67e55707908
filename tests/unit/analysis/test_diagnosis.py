"""From a broken step to the sites that must stay FP32, where the fault begins, and why."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autoprec.analysis.diagnosis import Diagnosis, _chains, diagnose, diagnosis_marks, kernel_reason
from autoprec.analysis.faults import FormatCheck
from autoprec.analysis.kernel_faults import KernelFault
from autoprec.analysis.low_step import Damage, reference_of
from autoprec.analysis.marks import Reason, ReasonCode
from autoprec.analysis.repair import Repair
from autoprec.capture import record, record_batches
from autoprec.graph.site import Site
from tests.op_graphs import chain, node, op_graph
from tests.unit.analysis.recorded import device_format, referred, site, workload
from tests.unit.analysis.workloads import ORDINARY, TIED, norms, ratio


def diagnosed(name: str = "fp16", *batches: list[float]) -> Diagnosis:
    """Return the diagnosis of x / (spread + 1e-8), where fp16 makes of 1e-8 a zero."""
    reference = reference_of(record(ratio(1e-8, *(batches or (ORDINARY, TIED)))))
    return diagnose([reference], device_format(name), loss_scale=1.0)


def test_a_fault_is_repaired_where_it_begins_and_where_it_is_read() -> None:
    found = diagnosed()
    assert found.repair is not None
    assert found.check.is_broken
    assert set(found.repair.sites) == set(found.causes) == set(found.kept) == {site("add#0"), site("div#0")}
    assert found.chains == ((site("add#0"), site("div#0")),)
    assert found.causes[site("add#0")].code is ReasonCode.UNDERFLOW
    assert found.causes[site("div#0")].code is ReasonCode.OVERFLOW_INSIDE
    assert found.causes[site("div#0")].detail.startswith(
        "1 of its inputs are 0 in fp16 and not in FP32, so div gives 4"
    )


@pytest.mark.parametrize("case", [("bf16", ORDINARY, TIED), ("fp16", ORDINARY)])
def test_what_does_no_harm_has_no_repair(case: Any) -> None:
    found = diagnosed(*case)
    assert not found.check.is_broken
    assert (found.repair, found.kept, found.chains, dict(found.causes)) == (None, (), (), {})
    assert diagnosis_marks(found) == ()


def test_all_sites_that_can_run_in_the_format_are_counted() -> None:
    reference = reference_of(record(norms()))
    assert diagnose([reference], device_format("bf16"), loss_scale=1.0).num_sites == 5


def test_steps_are_limited() -> None:
    reference = reference_of(record(ratio(1e-8, ORDINARY, TIED)))
    found = diagnose([reference], device_format("fp16"), loss_scale=1.0, max_steps=3)
    assert found.repair is not None
    assert not found.repair.is_minimal
    assert found.repair.num_steps <= 4


def test_marks_are_must_for_the_repair_and_for_wrong_kernels_and_nothing_else() -> None:
    found = diagnosed()
    fault = KernelFault(
        site=site("linear#0"), format="fp16", parameter="linear.bias", error=0.6, ideal_error=0.002, alone=0.5,
        numel=65536,
    )  # fmt: skip
    marks = diagnosis_marks(replace(found, kernel_faults=(fault,)))
    assert {(str(mark.site), mark.format, mark.verdict) for mark in marks} == {
        (":add#0", "fp16", "must"), (":div#0", "fp16", "must"), (":linear#0", "fp16", "must"),
    }  # fmt: skip
    assert len(marks) == 3
    assert all(len(mark.reasons) == 1 for mark in marks)
    assert replace(found, kernel_faults=(fault,)).kept == (site("add#0"), site("div#0"), site("linear#0"))


def test_a_wrong_kernel_says_which_gradient_how_wrong_and_over_how_many() -> None:
    fault = KernelFault(
        site=site("layer_norm#0"), format="bf16", parameter="norm.bias", error=0.6, ideal_error=0.0025, alone=0.5,
        numel=65536,
    )  # fmt: skip
    reason = kernel_reason(fault)
    assert reason.code is ReasonCode.KERNEL_WRONG
    assert reason.detail == (
        "on this device its bf16 kernel gets the gradient of norm.bias wrong by 60%, where rounding alone costs 0.2%: "
        "it sums 65,536 values in bf16"
    )  # fmt: skip
    assert dict(reason.evidence) == {"parameter": "norm.bias", "error": 0.6, "ideal_error": 0.0025, "error_alone": 0.5}


def sinkhorn(net: Any, x: torch.Tensor) -> torch.Tensor:
    scores = F.linear(x, net.weight)
    with torch.no_grad():
        q = (scores / 0.05).exp()
        q = q / q.sum()
    return -(q * scores.log_softmax(-1)).sum()


def test_a_call_that_no_policy_casts_is_named_with_the_site_that_it_reads() -> None:
    reference = referred(sinkhorn, torch.eye(4), weight=torch.eye(4) * 0.7)  # exp(14) = 1.2e6
    found = diagnose([reference], device_format("fp16"), loss_scale=1.0)
    assert found.repair is not None
    assert found.repair.sites == (site("linear#0"),)
    assert found.causes[site("linear#0")].code is ReasonCode.READ_AS_GIVEN
    assert found.causes[site("linear#0")].detail.startswith(":exp#0 computes in the format of its result")
    beyond = found.causes[site("exp#0")]
    assert beyond.code is ReasonCode.AS_GIVEN_BREAKS
    assert "runs under no_grad" in beyond.detail
    assert dict(beyond.evidence) == {"source": ":linear#0"}
    assert {mark.site for mark in diagnosis_marks(found)} == {site("linear#0"), site("exp#0")}


def test_a_call_that_writes_to_its_argument_is_named_as_such() -> None:
    def written(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * net.gain).square_().mean().sqrt()

    reference = referred(written, torch.full((4,), 300.0), gain=torch.ones(4))
    found = diagnose([reference], device_format("fp16"), loss_scale=1.0)
    assert found.causes[site("square#0")].code is ReasonCode.AS_GIVEN_BREAKS
    assert "it writes to its argument" in found.causes[site("square#0")].detail


def loss_of_batch(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * net.gain).square().mean().sqrt()


def test_a_fault_on_any_batch_is_found_on_that_batch() -> None:
    batches = torch.ones(4), torch.full((4,), 300.0)
    references = [
        reference_of(each) for each in record_batches(workload(loss_of_batch, *batches, gain=torch.ones(4)), 2)
    ]
    found = diagnose(references, device_format("fp16"), loss_scale=1.0)
    assert (found.check.batch, found.check.is_broken) == (1, True)
    assert found.causes[site("square#0")].detail.startswith("square of values up to 300 reaches 9e+04")
    assert not diagnose(references[:1], device_format("fp16"), loss_scale=1.0).check.is_broken


def test_a_site_that_only_another_batch_runs_says_so() -> None:
    def branched(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = (x * net.gain).square() / 1e4 if bool(x[0] > 200) else (x * net.gain * 1e5).log().exp() / 1e5
        return y.sum()

    batches = torch.full((4,), 300.0), torch.ones(4)
    references = [reference_of(each) for each in record_batches(workload(branched, *batches, gain=torch.ones(4)), 2)]
    found = diagnose(references, device_format("fp16"), loss_scale=1.0)
    assert found.check.batch == 0
    assert found.causes[site("exp#0")].detail == "the step is broken on another batch unless it stays FP32"
    assert diagnosis_marks(found)


def test_layers_that_run_one_after_another_in_a_loop_are_told_as_a_loop() -> None:
    def unrolled(net: Any, x: torch.Tensor) -> torch.Tensor:
        state = x * net.gain
        for _ in range(40):
            state = state * 0.999  # bf16 rounds it back to 1
        return (state.log() * 30).exp().sum()

    reference = referred(unrolled, torch.ones(4), gain=torch.ones(4))
    found = diagnose([reference], device_format("bf16"), loss_scale=1.0)
    loop = [reason for each, reason in found.causes.items() if each.op == "mul" and each.index < 40]
    assert loop
    assert {reason.code for reason in loop} == {ReasonCode.BUILD_UP}
    assert loop[0].detail.startswith("runs 40 times one after the other")


def test_sites_that_read_one_another_are_a_chain_through_what_only_passes_numbers_on() -> None:
    a, b, c, d = (node(name, op) for name, op in (("a", "exp"), ("b", "relu"), ("c", "sum"), ("d", "mul")))
    graph = chain(a, b, c, d)
    assert tuple(_chains(graph, [site("exp#0"), site("sum#0")])) == ((site("exp#0"), site("sum#0")),)
    through_mul = chain(a, d, c)
    assert tuple(_chains(through_mul, [site("exp#0"), site("sum#0")])) == ((site("exp#0"),), (site("sum#0"),))
    view = chain(a, node("v", "view", index=None), c)
    assert tuple(_chains(view, [site("exp#0"), site("sum#0")])) == ((site("exp#0"), site("sum#0")),)


def test_two_origins_that_meet_are_one_chain_in_order_of_the_repair() -> None:
    a, b, c = node("a", "exp"), node("b", "log"), node("c", "mul")
    graph = op_graph([a, b, c], [("a", "c"), ("b", "c")])
    assert tuple(_chains(graph, [site("exp#0"), site("log#0"), site("mul#0")])) == (
        (site("exp#0"), site("log#0"), site("mul#0")),
    )


def test_a_site_of_many_calls_is_in_one_chain() -> None:
    calls = [node("a1", "exp"), node("b1", "log"), node("a2", "exp", call=1), node("c", "mul")]
    graph = op_graph(calls, [("a1", "b1"), ("b1", "a2"), ("a2", "c")])
    (only,) = _chains(graph, [site("exp#0"), site("log#0"), site("mul#0")])
    assert only == (site("exp#0"), site("log#0"), site("mul#0"))


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers_in(each)
    elif isinstance(value, float):
        yield value


def test_the_evidence_of_every_reason_can_be_written_as_json() -> None:
    for found in (
        diagnosed(),
        diagnose([referred(sinkhorn, torch.eye(4), weight=torch.eye(4) * 0.7)], device_format("fp16"), loss_scale=1.0),
    ):
        for mark in diagnosis_marks(found):
            for reason in mark.reasons:
                json.dumps(dict(reason.evidence), allow_nan=False)
                assert all(map(math.isfinite, numbers_in(dict(reason.evidence))))


def test_what_is_kept_is_told_once() -> None:
    fault = KernelFault(
        site=site("layer_norm#0"), format="bf16", parameter="norm.bias", error=0.6, ideal_error=0.0025, alone=0.5,
        numel=65536,
    )  # fmt: skip
    repair = Repair(
        format="bf16", sites=(site("exp#0"),), error=0.01, alone={site("exp#0"): math.inf}, num_steps=3, is_minimal=True
    )  # fmt: skip
    check = FormatCheck(format="bf16", damage=Damage(loss_error=1.0, gradient_error=1.0), batch=0, floor=0.0)
    found = Diagnosis(
        format="bf16", num_sites=3, check=check, repair=repair, chains=((site("exp#0"),),),
        causes={site("exp#0"): Reason(code=ReasonCode.OVERFLOW, detail="it overflows")},
        kernel_faults=(fault, replace(fault, parameter="norm.weight")),
    )  # fmt: skip
    assert found.kept == (site("exp#0"), Site("", "layer_norm", 0))
