from dataclasses import replace

import pytest

from autoprec.capture import record
from autoprec.measure import op_time as op_time_module
from autoprec.measure.op_time import Limits, measure_op_times
from autoprec.policy import Policy, Rule, preset, resolve
from autoprec.records.codec import decode, encode
from autoprec.records.cost import CostErrorRecord, CostModelRecord
from autoprec.runtime.device import describe
from autoprec.search.cost_check import check_cost_model, random_policies, record_of
from autoprec.search.cost_model import CostModel
from autoprec.search.objective import Protocol
from autoprec.workload import load_batches

from .mlp import workload


@pytest.fixture(name="model")
def _model(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPREC_CACHE", str(tmp_path))
    monkeypatch.setattr(op_time_module, "op_clock", lambda device: lambda call: (call(), 1e-3))
    made = record(workload())
    limits = Limits(min_rounds=1, max_rounds=1, slow_s=1e9)
    return CostModel(op_graph=made.op_graph, op_times=measure_op_times(made, ("bf16",), describe("cpu"), limits=limits))


def protocol():
    task = workload()
    return Protocol(
        workload=task, device="cpu", seed=0, batches=load_batches(task, 2, "cpu"), horizon=10, margin=0.01,
        slow_limit=3.0,
    )  # fmt: skip


def test_errors_are_predicted_over_measured_with_fp32_as_the_bar(model):
    """A step of FP32 takes 2 s on this clock, that of the low policy 3 s, whatever they do."""
    calls = []

    def clock(call):
        calls.append(call)
        low = call.__self__.precision.policy.name == "low"
        return call(), 3.0 if low else 2.0

    low = Policy(name="low", rules=(Rule(sites="*:gelu", format="bf16"), Rule(sites="*", format="fp32")))
    policies = {
        "low": low,
        "fp16": preset("autocast-fp16", "cpu"),  # not timed in that format: left out
        "stored": replace(low, name="stored", float32_matmul="bf16"),
    }
    calibrated, found = check_cost_model(model, protocol(), policies, rounds=6, clock=clock)
    assert list(found.errors) == ["fp32", "low"]
    assert found.errors["fp32"].time_error == pytest.approx(0.0)
    assert found.errors["low"].step_s == pytest.approx(3.0)
    assert found.errors["low"].spread == pytest.approx(0.0)
    predicted = calibrated.predict_policy(low).step_s
    assert found.errors["low"].predicted_step_s == pytest.approx(predicted)
    assert found.median_error == pytest.approx(abs(predicted / 3.0 - 1))
    assert found.median_bytes_error == 0.0
    assert found.overhead_s == pytest.approx(2.0 - model.predict(model.uniform("fp32")).step_s)


def error(time_error, *, is_bound=False):
    return CostErrorRecord(
        step_s=1.0, predicted_step_s=1.0 + time_error, time_error=time_error, saved_bytes=10,
        predicted_saved_bytes=10, bytes_error=0.0, is_bound=is_bound,
    )  # fmt: skip


def test_the_median_is_of_what_is_neither_fp32_nor_a_bound(model):
    errors = {"fp32": error(0.0), "a": error(-0.03), "b": error(0.01), "c": error(0.02), "d": error(-9, is_bound=True)}
    found = record_of(model, errors)
    assert found.median_error == pytest.approx(0.02)
    assert record_of(model, {"fp32": error(0.0)}).median_error is None
    assert decode(CostModelRecord, encode(found)) == found


def test_random_policies_are_repeatable_mixed_and_keep_what_is_kept(model):
    sites = model.op_graph.sites()
    kept = sites[:1]
    found = random_policies(model.op_graph, "bf16", 4, seed=1, kept=kept)
    assert found == random_policies(model.op_graph, "bf16", 4, seed=1, kept=kept)
    formats = {name: resolve(policy, sites).formats for name, policy in found.items()}
    assert all(each[kept[0]] == "fp32" for each in formats.values())
    assert len({tuple(each.values()) for each in formats.values()}) > 1
    assert {fmt for each in formats.values() for fmt in each.values()} == {"fp32", "bf16"}
