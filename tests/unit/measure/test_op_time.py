import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.capture import record
from autoprec.measure import op_time
from autoprec.measure.op_time import Limits, facts_of, measure_op_times, signatures
from autoprec.runtime.device import describe
from autoprec.workload import Workload

ONE = Limits(min_rounds=1, max_rounds=1, slow_s=1e9)
DEVICE = describe("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Keep times in a folder of the test, and have each block take a millisecond whatever it does."""
    monkeypatch.setenv("AUTOPREC_CACHE", str(tmp_path / "times"))
    monkeypatch.setattr(op_time, "op_clock", lambda device: lambda call: (call(), 1e-3))
    return tmp_path / "times"


class Body(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.table = nn.Embedding(5, 8)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def recording(run):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return record(
        Workload(model=lambda: Body(run), batches=lambda: [x], loss=lambda model, batch: model(batch).square().mean())
    )


def three_layers(model, x):
    for layer in model.layers:
        x = torch.tanh(layer(x))
    return x


def named(times, word):
    found = [key for key in times.times if word in key]
    assert found, word
    return [times.times[key] for key in found]


def test_layers_of_one_shape_are_measured_once(monkeypatch):
    ran = []
    original = op_time.paired_times
    monkeypatch.setattr(op_time, "paired_times", lambda makers, **kw: ran.append(makers) or original(makers, **kw))
    times = measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=ONE)
    # The first layer reads the batch, which has no gradient; the others read what requires one.
    assert len(named(times, ".linear")) == 2
    assert len(named(times, "tanh")) == 1
    assert len(ran) == times.num_signatures == len(times.times)
    calls = [each for each in times.facts if each.signature and ".linear" in each.signature]
    assert len(calls) == 3
    assert times.num_unmeasured == times.num_from_cache == 0


def test_a_second_run_measures_nothing(monkeypatch):
    first = measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=ONE)
    monkeypatch.setattr(op_time, "paired_times", lambda *_, **__: pytest.fail("measured again"))
    second = measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=ONE)
    assert second.times == first.times
    assert second.casts == first.casts
    assert second.num_from_cache == second.num_signatures
    assert second.measured_s == 0.0


def test_a_new_format_is_put_on_the_scale_of_the_stored_fp32_time(monkeypatch):
    measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=ONE)
    monkeypatch.setattr(op_time, "op_clock", lambda device: lambda call: (call(), 4e-3))  # a slower hour
    times = measure_op_times(recording(three_layers), ("bf16", "fp16"), DEVICE, limits=ONE)
    (tanh,) = named(times, "tanh")
    assert tanh["fp16"].timing.total_s == pytest.approx(tanh["fp32"].timing.total_s)


def test_the_budget_ends_measuring_and_what_it_did_not_reach_is_counted(monkeypatch, folder):
    now = [0.0]
    monkeypatch.setattr(op_time.time, "perf_counter", lambda: now[0])

    def clock(call):
        now[0] += 1.0
        return call(), 1e-3

    monkeypatch.setattr(op_time, "op_clock", lambda device: clock)
    monkeypatch.setattr(op_time, "_missing_sizes", lambda *_: ())
    start = now[0]
    monkeypatch.setattr(op_time, "backward_call", lambda *_: 0.0)
    times = measure_op_times(
        recording(three_layers), ("bf16",), DEVICE, limits=Limits(total_s=9.0, min_rounds=1, max_rounds=1, slow_s=9.0)
    )
    # One signature takes ten seconds: two first calls of FP32, one of bf16, and a round, each forward and backward.
    assert now[0] - start == pytest.approx(10.0)
    assert len(times.times) == 1
    assert times.num_unmeasured == times.num_signatures - 1
    again = measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=Limits(total_s=1e6))
    assert again.num_from_cache == 1
    assert again.num_unmeasured == 0


def test_a_format_without_a_kernel_is_infinite(monkeypatch):
    def picky(x):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no kernel for bf16")
        return torch.tanh(x)

    original = op_time.isolated

    def isolated(func, node, arguments, dtype):
        return original(picky if node.op == "tanh" else func, node, arguments, dtype)

    monkeypatch.setattr(op_time, "isolated", isolated)
    (tanh,) = named(measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=ONE), "tanh")
    assert tanh["bf16"].timing.total_s == math.inf
    assert tanh["bf16"].timing.reason == "no kernel for bf16"
    assert math.isfinite(tanh["fp32"].timing.total_s)


def test_a_call_that_cannot_run_by_itself_is_known_from_then_on(monkeypatch):
    original = op_time.isolated

    def isolated(func, node, arguments, dtype):
        def fails(*_):
            raise RuntimeError("only inside its step")

        return original(fails if node.op == "tanh" else func, node, arguments, dtype)

    monkeypatch.setattr(op_time, "isolated", isolated)
    times = measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=ONE)
    (tanh,) = named(times, "tanh")
    assert tanh["fp32"].timing.total_s == 0.0
    assert tanh["bf16"].timing.total_s == math.inf
    assert "only inside its step" in tanh["bf16"].timing.reason
    again = measure_op_times(recording(three_layers), ("bf16",), DEVICE, limits=ONE)
    assert again.num_from_cache == again.num_signatures


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: F.relu(model.layers[0](x), inplace=True),
        lambda model, x: model.layers[0](x).mul_(2.0).tanh_(),
        lambda model, x: F.dropout(model.layers[0](x), 0.5),
        lambda model, x: model.layers[0](x) + torch.randn_like(x),
        lambda model, x: model.norm(model.layers[0](x)),
        lambda model, x: torch.cat(model.layers[0](x).chunk(2, 1)[::-1], 1),
        lambda model, x: model.layers[0](x).index_add(0, torch.tensor([1, 1]), x[:2]),
        lambda model, x: torch.bernoulli(x.sigmoid(), generator=torch.Generator().manual_seed(1)) * model.layers[0](x),
    ],
    ids=["relu in place", "chain in place", "dropout", "noise", "batch norm", "several outputs", "index_add", "drawn"],
)
def test_measuring_leaves_the_step_as_it_is(run):
    made = recording(run)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    times = measure_op_times(made, ("bf16",), DEVICE, limits=ONE)
    assert times.num_unmeasured == 0
    assert all(math.isfinite(t["fp32"].timing.total_s) and not t["fp32"].timing.reason for t in times.times.values())
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert made.replay_matches


def test_the_replay_that_measures_draws_what_the_step_drew(monkeypatch):
    made = recording(lambda model, x: F.dropout(model.layers[0](x), 0.5) + torch.randn_like(x))
    losses = []
    original = op_time._Timing.loss
    monkeypatch.setattr(op_time._Timing, "loss", lambda self: losses.append(original(self).item()))
    state = torch.get_rng_state()
    measure_op_times(made, ("bf16",), DEVICE, limits=ONE)
    assert losses == [made.loss]
    assert torch.equal(torch.get_rng_state(), state)


def test_calls_under_no_grad_have_no_backward():
    def run(model, x):
        with torch.no_grad():
            target = torch.tanh(model.layers[0](x))
        return torch.tanh(model.layers[0](x)) - target

    times = measure_op_times(recording(run), ("bf16",), DEVICE, limits=ONE)
    assert any("tanh" in key and key.endswith("no_grad") for key in times.times)
    assert any("tanh" in key and not key.endswith("no_grad") for key in times.times)


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (lambda model, x: model.layers[0](x) + torch.fft.rfft(x).real.sum(), "rfft(float32"),
        (lambda model, x: model.layers[0](x) + torch.sparse.mm(x[:, :6].to_sparse(), x), "sparse"),
        (lambda model, x: model.layers[0](x) + (x.argmax(1) + 1).sum(), "add(int64"),
        (lambda model, x: model.layers[0](x) + x.double().exp().sum(), "exp(float64"),
    ],
)
def test_complex_sparse_integer_and_double_calls_are_left_out(run, word):
    facts = facts_of(recording(run))
    assert not [each for each in signatures(facts) if word in each]
    assert [each for each in signatures(facts) if ".linear" in each]


def test_views_and_picked_outputs_lie_in_the_memory_of_what_they_came_from():
    facts = facts_of(recording(lambda model, x: model.layers[0](x).chunk(2, 1)[0].reshape(-1).tanh()))
    by_signature = {each.signature: each for each in facts if each.signature}
    (linear,) = [each for key, each in by_signature.items() if ".linear" in key]
    (tanh,) = [each for key, each in by_signature.items() if "tanh" in key]
    (chunk,) = [each for key, each in by_signature.items() if "chunk" in key]
    assert {fact.root for fact in chunk.outputs} == {linear.outputs[0].root}
    assert not chunk.outputs[0].is_dense
    assert tanh.outputs[0].root != tanh.inputs[0].root
    assert linear.inputs[1].is_stored
