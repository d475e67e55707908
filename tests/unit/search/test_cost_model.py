import math
from dataclasses import replace

import pytest

from autoprec.capture import record
from autoprec.errors import MeasurementError
from autoprec.graph.site import Site
from autoprec.measure import Training, measure_memory
from autoprec.measure import op_time as op_time_module
from autoprec.measure.call_facts import CallFacts, TensorFact
from autoprec.measure.cast_time import CastTime, CastTimes
from autoprec.measure.op_call import Kept
from autoprec.measure.op_time import Limits, OpTimes, measure_op_times
from autoprec.measure.paired import Timing
from autoprec.measure.time_cache import OpTime
from autoprec.policy import Parameters, Policy, Rule, preset
from autoprec.runtime.device import describe
from autoprec.search.cost_model import CostModel
from autoprec.workload import load_batches
from tests.op_graphs import node, op_graph

from .mlp import workload

NUMEL = 100
LINEAR, TANH, EXP = Site("", "linear", 0), Site("", "tanh", 0), Site("", "exp", 0)
LOSS = Site("@loss", "mean", 0)


def fact(name, *, root="", stored=False, grad=True, numel=NUMEL):
    return TensorFact(
        source=(name, 0), root=root or name, root_numel=numel, numel=numel, dtype="float32", is_dense=True,
        requires_grad=grad, is_stored=stored,
    )  # fmt: skip


def op_time(total_s, dtype, **kept):
    return OpTime(timing=Timing(forward_s=total_s, backward_s=0.0), kept=Kept(outputs=(dtype,), **kept))


def both(fp32_s, low_s, **kept):
    return {"fp32": op_time(fp32_s, "float32", **kept), "bf16": op_time(low_s, "bfloat16", **kept)}


X, W = fact("x", grad=False), fact("w", stored=True, numel=50)
Y, Z, E, V, M = fact("linear"), fact("tanh"), fact("exp"), fact("view", root="linear"), fact("mean", numel=1)


def model(times=None, edges=(), **fields):
    """Return x -> linear(w) -> view -> tanh and exp, whose sum of squares is the loss of tanh alone."""
    calls = (
        CallFacts(name="x", signature=None, inputs=(), outputs=(X,)),
        CallFacts(name="w", signature=None, inputs=(), outputs=(W,)),
        CallFacts(name="linear", signature="linear", inputs=(X, W), outputs=(Y,)),
        CallFacts(name="view", signature="view", inputs=(Y,), outputs=(V,)),
        CallFacts(name="tanh", signature="tanh", inputs=(V,), outputs=(Z,)),
        CallFacts(name="exp", signature="exp", inputs=(V,), outputs=(E,)),
        CallFacts(name="mean", signature="mean", inputs=(Z,), outputs=(M,)),
    )
    graph = op_graph(
        [
            node("x", kind="input"), node("w", kind="parameter"), node("linear", "linear"),
            node("view", "view", index=None), node("tanh", "tanh"), node("exp", "exp"),
            node("mean", "mean", module="@loss"),
        ],
        edges,
    )  # fmt: skip
    known = {
        "linear": both(10.0, 4.0, saved_inputs=(0, 1)),
        "view": both(0.5, 0.5),
        "tanh": both(2.0, 1.5, saved_outputs=(0,)),
        "exp": both(3.0, 2.0, saved_inputs=(0,), fresh_bytes=7),
        "mean": both(1.0, 1.0),
    }
    point = (CastTime(numel=1, forward_s=0.01, backward_s=0.02), CastTime(numel=101, forward_s=1.01, backward_s=2.02))
    op_times = OpTimes(
        facts=calls,
        formats=("bf16",),
        times={**known, **(times or {})},
        casts=CastTimes(points={"bf16 down dense": point, "bf16 up dense": point}),
        measured_s=1.0,
        num_from_cache=0,
        num_unmeasured=0,
    )
    return CostModel(op_graph=graph, op_times=op_times, **fields)


def cast_s(numel, *, grad=True):
    return 0.01 * numel * (3 if grad else 1)


def test_fp32_is_the_sum_of_its_ops():
    found = model().predict(dict.fromkeys((LINEAR, TANH, EXP, LOSS), "fp32"))
    assert found.op_s == pytest.approx(16.5)
    assert found.cast_s == 0.0
    assert found.step_s == pytest.approx(16.5)


def test_a_low_site_casts_its_inputs_and_its_fp32_readers_cast_back():
    found = model().predict({LINEAR: "bf16", TANH: "fp32", EXP: "fp32", LOSS: "fp32"})
    # x has no gradient; w is cast with one; tanh and exp cast the view of the result once each.
    assert found.cast_s == pytest.approx(cast_s(100, grad=False) + cast_s(50) + 2 * cast_s(100))
    assert found.op_s == pytest.approx(10.5)


def test_what_no_rule_casts_runs_in_what_it_is_given():
    found = model().predict({LINEAR: "bf16", TANH: "as_given", EXP: "as_given", LOSS: "as_given"}, outputs="computed")
    assert found.cast_s == pytest.approx(cast_s(100, grad=False) + cast_s(50))
    assert found.op_s == pytest.approx(4.0 + 0.5 + 1.5 + 2.0 + 1.0)


def test_results_of_the_model_are_cast_for_the_loss_unless_they_are_to_stay():
    low = {LINEAR: "bf16", TANH: "bf16", EXP: "bf16"}
    kept = model().predict({**low, LOSS: "as_given"}, outputs="computed")
    cast = model().predict({**low, LOSS: "as_given"}, outputs="fp32")
    assert cast.cast_s - kept.cast_s == pytest.approx(cast_s(100))


def test_the_cast_of_a_parameter_is_shared_by_its_readers():
    shared = model()
    facts = list(shared.op_times.facts)
    facts.insert(3, CallFacts(name="again", signature="linear", inputs=(X, W), outputs=(fact("again"),)))
    graph = op_graph([*shared.op_graph, node("again", "linear", index=1)])
    twice = CostModel(op_graph=graph, op_times=replace(shared.op_times, facts=tuple(facts)))
    low = {LINEAR: "bf16", Site("", "linear", 1): "bf16", TANH: "bf16", EXP: "bf16", LOSS: "bf16"}
    assert twice.predict(low).cast_s - shared.predict(low).cast_s == pytest.approx(cast_s(100, grad=False))


def test_saved_memory_counts_each_block_once_and_no_parameter():
    found = model().predict(dict.fromkeys((LINEAR, TANH, EXP, LOSS), "fp32"))
    # linear keeps x (and w, a parameter); tanh its result; exp the memory of linear's result, and 7 bytes of its own.
    assert found.saved_bytes == 400 + 400 + 400 + 7


def test_saved_memory_of_low_sites_is_that_of_the_casts():
    found = model().predict({LINEAR: "bf16", TANH: "fp32", EXP: "fp32", LOSS: "fp32"})
    assert found.saved_bytes == 200 + 100 + 400 + 400 + 7
    low = model().predict(dict.fromkeys((LINEAR, TANH, EXP, LOSS), "bf16"))
    assert low.saved_bytes == 200 + 100 + 200 + 200 + 7


def test_an_op_that_cannot_run_low_makes_the_step_infinite():
    never = both(2.0, math.inf)
    found = model({"tanh": never})
    assert found.predict({TANH: "bf16"}).step_s == math.inf
    assert math.isfinite(found.predict({TANH: "fp32"}).step_s)
    assert found.op_costs("bf16")["tanh"].low_s == math.inf


def test_a_bound_makes_the_prediction_one():
    bound = both(2.0, 9.0)
    bound["bf16"] = OpTime(timing=replace(bound["bf16"].timing, is_bound=True), kept=bound["bf16"].kept)
    assert model({"tanh": bound}).predict({TANH: "bf16"}).is_bound
    assert not model({"tanh": bound}).predict({TANH: "fp32"}).is_bound


def test_a_calibrated_model_gives_back_the_fp32_step():
    found = model().calibrated(20.0, 2000)
    plain = found.predict(found.uniform("fp32"))
    assert plain.step_s == pytest.approx(20.0)
    assert plain.saved_bytes == 2000
    assert found.predict({LINEAR: "bf16"}).overhead_s == pytest.approx(3.5)
    assert found.calibrated(20.0, 2000) == found


def test_costs_of_nodes_are_what_a_cut_needs():
    costs = model().op_costs("bf16")
    assert (costs["linear"].fp32_s, costs["linear"].low_s) == (10.0, 4.0)
    assert (costs["linear"].fp32_bytes, costs["linear"].low_bytes) == (400, 200 + 100)
    assert (costs["exp"].fp32_bytes, costs["exp"].low_bytes) == (407, 207)
    assert costs["view"].fp32_bytes == 0
    assert "x" not in costs
    casts = model().cast_costs("bf16")
    assert casts["linear"].down_s == pytest.approx(cast_s(100))
    assert casts["x"].up_s == pytest.approx(cast_s(100, grad=False))


def test_what_the_budget_did_not_reach_cannot_run_low():
    reached = model()
    times = {key: value for key, value in reached.op_times.times.items() if key != "tanh"}
    found = CostModel(op_graph=reached.op_graph, op_times=replace(reached.op_times, times=times))
    assert found.op_costs("bf16")["tanh"].low_s == math.inf
    assert found.predict(found.uniform("fp32")).op_s == pytest.approx(14.5)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(name="p", rules=(Rule(sites="*", format="fp16"),)), "not timed in fp16, only in fp32, bf16"),
        (
            Policy(name="p", rules=(Rule(sites="*", format="fp32"),), parameters=Parameters(storage="bf16")),
            "stores parameters or optimizer state",
        ),
        (Policy(name="p", rules=(Rule(sites="*", format="fp32"),), float32_matmul="bf16"), "reduces FP32 matmuls"),
    ],
)
def test_a_policy_whose_parts_were_not_measured_is_refused(policy, words):
    with pytest.raises(MeasurementError, match=rf'policy "p": its step time cannot be predicted: .*{words}'):
        model().predict_policy(policy)


@pytest.mark.parametrize("name", ["fp32", "autocast-bf16", "everything", "norms"])
def test_saved_bytes_of_a_real_step_come_out_exactly(name, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPREC_CACHE", str(tmp_path))
    monkeypatch.setattr(op_time_module, "op_clock", lambda device: lambda call: (call(), 1e-3))
    policies = {
        "everything": Policy(name="everything", rules=(Rule(sites="*", format="bf16"),)),
        "norms": Policy(
            name="norms", rules=(Rule(sites="*:layer_norm", format="bf16"), Rule(sites="*", format="fp32"))
        ),
    }
    policy = policies[name] if name in policies else preset(name, "cpu")
    task = workload()
    made = record(task)
    limits = Limits(min_rounds=1, max_rounds=1, slow_s=1e9)
    found = CostModel(
        op_graph=made.op_graph, op_times=measure_op_times(made, ("bf16",), describe("cpu"), limits=limits)
    )
    with Training(task, policy, device="cpu", seed=0, batches=load_batches(task, 1, "cpu")) as training:
        assert found.predict_policy(policy).saved_bytes == measure_memory(training).saved_bytes


def test_a_site_in_fp8_reads_bf16_rows_and_its_weight_as_it_is_stored():
    fp8 = {**both(10.0, 4.0, saved_inputs=(0, 1)), "fp8_e4m3": op_time(1.0, "bfloat16", saved_inputs=(0, 1))}
    found = model({"linear": fp8})
    low = dict.fromkeys((TANH, EXP, LOSS), "bf16")
    fast, plain = found.predict({LINEAR: "fp8_e4m3", **low}), found.predict({LINEAR: "bf16", **low})
    assert plain.op_s - fast.op_s == pytest.approx(3.0)
    assert plain.cast_s - fast.cast_s == pytest.approx(cast_s(50))  # of the weight, which FP8 rounds by itself
    assert plain.saved_bytes - fast.saved_bytes == 50 * 2


def test_the_slowdown_of_compiled_policies_is_that_of_the_ops_in_libraries():
    low = Policy(name="low", rules=(Rule(sites="*:linear", format="bf16"), Rule(sites="*", format="fp32")))
    found = model({"linear": both(10.0, 40.0, saved_inputs=(0, 1))})
    eager = found.slowdown(low, 20.0)
    # Calibrated: 16.5 of 20 are ops; linear takes 30 longer, and casts come on top.
    assert eager == pytest.approx(1 + (30 + cast_s(100, grad=False) + cast_s(50) + 2 * cast_s(100)) / 20)
    assert found.slowdown(replace(low, memory_format="channels_last"), 20.0) is None
    compiled = replace(low, compile="inductor")
    assert found.slowdown(compiled, 20.0) == pytest.approx(40 / 20)
    assert found.slowdown(replace(compiled, memory_format="channels_last"), 20.0) == pytest.approx(40 / 20 / 1.6)
    fp16 = Policy(name="other", rules=(Rule(sites="*", format="fp16"),), compile="inductor")
    assert found.slowdown(fp16, 20.0) is None
    assert "compiles the model with inductor" in found.unpredictable(compiled)


def test_what_the_loss_reads_behind_a_view_of_its_own_was_cast_once_for_it():
    plain = model()
    flat = fact("flat", root="tanh")
    mean = CallFacts(name="mean", signature="mean", inputs=(flat,), outputs=(M,))
    facts = (*plain.op_times.facts[:-1], CallFacts(name="flat", signature="view", inputs=(Z,), outputs=(flat,)), mean)
    before = [each for each in plain.op_graph if each.name != "mean"]
    nodes = [*before, node("flat", "view", index=None), node("mean", "mean", module="@loss")]
    found = CostModel(op_graph=op_graph(nodes), op_times=replace(plain.op_times, facts=facts))
    low = {LINEAR: "bf16", TANH: "bf16", EXP: "bf16"}
    kept = found.predict({**low, LOSS: "bf16"}, outputs="computed").cast_s
    assert found.predict({**low, LOSS: "fp32"}).cast_s - kept == pytest.approx(cast_s(100))
    assert found.predict({**low, LOSS: "bf16"}).cast_s - kept == pytest.approx(2 * cast_s(100)), "up, and down again"


def test_what_the_loss_makes_itself_is_not_cast_for_it():
    plain = model()
    again = CallFacts(name="again", signature="mean", inputs=(M,), outputs=(fact("again", numel=1),))
    graph = op_graph([*plain.op_graph, node("again", "mean", index=1, module="@loss")])
    found = CostModel(op_graph=graph, op_times=replace(plain.op_times, facts=(*plain.op_times.facts, again)))
    low = dict.fromkeys((LINEAR, TANH, EXP, LOSS, Site("@loss", "mean", 1)), "bf16")
    assert found.predict(low).cast_s == pytest.approx(plain.predict(low).cast_s)


def test_what_is_picked_from_several_results_has_a_cast_of_its_own_size():
    plain = model()
    third = replace(fact("parts", numel=30), source=("parts", 1))
    facts = (
        CallFacts(name="parts", signature=None, inputs=(X,), outputs=(fact("parts", numel=70), third)),
        CallFacts(name="picked", signature=None, inputs=(third,), outputs=(third,)),
    )
    graph = op_graph([*plain.op_graph, node("parts", "split", index=None), node("picked", "getitem", index=None)])
    casts = CostModel(op_graph=graph, op_times=replace(plain.op_times, facts=facts)).cast_costs("bf16")
    assert casts["parts"].down_s == pytest.approx(cast_s(100))
    assert casts["picked"].down_s == pytest.approx(cast_s(30))
