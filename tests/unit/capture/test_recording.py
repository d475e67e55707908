"""Recording and replay, on every construct that training code uses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoprec.capture import Recording, attribute_name, record
from autoprec.errors import CaptureError, WorkloadError
from autoprec.workload import Workload
from autoprec.workload.seeding import seeded


class Body(nn.Module):
    """A module whose forward is given as a function of the module and the input."""

    def __init__(self, run: Callable[["Body", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.recur = nn.LSTM(4, 4, batch_first=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.register_buffer("offset", torch.ones(4))
        self.plain = torch.full((4,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


class Twice(torch.autograd.Function):
    """Doubles forwards and, on purpose, triples backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


def in_place(m: Body, x: torch.Tensor) -> torch.Tensor:
    y = m.one(x)
    y += 1
    y.mul_(2)
    y[:, 0] = 0
    F.relu(y, inplace=True)
    return y


def out_argument(m: Body, x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    torch.add(x, m.offset, out=result)
    return m.one(result)


def write_through_view(m: Body, x: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(3, 4)
    row = table[1]
    row.copy_(x[0])
    return m.one(table)


def data_dependent(m: Body, x: torch.Tensor) -> torch.Tensor:
    y = m.one(x)
    for _ in range(int(x.abs().sum().item()) % 3 + 1):
        y = m.two(y) if y.sum() > 0 else m.one(y)
    return y


def without_grad(m: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = m.two(x) * 2
    return m.one(x) * target * 3


def drawn(m: Body, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    return m.one(x + noise + torch.rand_like(x))


def penalty(m: Body, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.one(x).square().sum(), x, create_graph=True)
    return m.two(slope)


def properties(m: Body, x: torch.Tensor) -> torch.Tensor:
    y = m.one(x)
    y.data = y.data * 2
    return y.T.T @ m.plain.diag()


def not_printable(m: Body, x: torch.Tensor) -> torch.Tensor:
    import numpy as np

    return m.one(x) ** 2 + torch.as_tensor(np.arange(4.0, dtype="float32")) * np.float64(0.5)


CONSTRUCTS: dict[str, Callable[[Body, torch.Tensor], torch.Tensor]] = {
    "in place": in_place,
    "out=": out_argument,
    "write through a view": write_through_view,
    "several outputs": lambda m, x: m.one(x).max(dim=-1).values + m.two(x).split(2, dim=-1)[1].sum(-1),
    "LSTM": lambda m, x: m.recur(x[None])[0] * m.recur(x[None])[1][0],
    "packed LSTM": lambda m, x: m.recur(nn.utils.rnn.pack_sequence([x, x[:2]], enforce_sorted=False))[0].data,
    "multi-head attention": lambda m, x: m.attend(x, x, x)[0],
    "control flow": data_dependent,
    "shared module": lambda m, x: m.one(F.gelu(m.one(x))),
    "dropout": lambda m, x: m.drop(m.one(m.drop(x))),
    "batch norm": lambda m, x: m.norm(m.one(x)),
    "no_grad": without_grad,
    "generator": drawn,
    "custom function": lambda m, x: Twice.apply(m.one(x)) + 1,
    "checkpoint": lambda m, x: checkpoint(lambda y: m.drop(m.one(y)), m.two(x), use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(lambda y: m.drop(m.one(y)), m.two(x), use_reentrant=True),
    "gradient penalty": penalty,
    "vmap": lambda m, x: torch.func.vmap(lambda row: row * row.sum())(m.one(x)),
    "properties": properties,
    "plain tensor": lambda m, x: m.one(x) * m.plain,
    "not printable": not_printable,
    "nested lists": lambda m, x: torch.cat([torch.stack([m.one(x), x]), m.two(x)[None]]),
    "sum of a generator": lambda m, x: sum(layer(x) for layer in (m.one, m.two)),  # type: ignore[misc,return-value]
}


def workload(run: Callable[[Body, torch.Tensor], torch.Tensor]) -> Workload:
    batch = torch.linspace(-1, 1, 12).reshape(3, 4)
    return Workload(model=lambda: Body(run), batches=lambda: [batch], loss=lambda m, x: m(x).square().mean() + 0.1)


def gradients(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_step(run: Callable[[Body, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, nn.Module]:
    """One step as a training script would take it, under the seeds that `record` documents."""
    task = workload(run)
    with seeded(0, 0):
        model = task.model()
    with seeded(0, 1):
        return task.loss(model, *task.batches()), model


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_replay_equals_the_plain_run_bit_for_bit(name: str) -> None:
    recording = record(workload(CONSTRUCTS[name]))
    plain_loss, plain_model = plain_step(CONSTRUCTS[name])
    assert recording.loss == plain_loss.item()
    assert recording.replay_matches
    assert recording.replay_matches, "a replay leaves the recorded state as it was"
    replayed = gradients(recording.replay(), recording.model)
    wanted = gradients(plain_loss, plain_model)
    assert replayed.keys() == wanted.keys()
    for parameter, grad in wanted.items():
        assert torch.equal(replayed[parameter], grad), parameter


def recorded(name: str) -> Recording:
    return record(workload(CONSTRUCTS[name]))


def sites(name: str) -> list[str]:
    return [str(site) for site in recorded(name).op_graph.sites()]


def test_the_graph_module_is_executable_by_itself() -> None:
    recording = recorded("shared module")
    assert recording.graph_module(*recording.inputs).item() == recording.loss


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_replay_has_gradients_under_every_mode_and_leaves_it(mode: Callable[[], Any]) -> None:
    recording = recorded("no_grad")
    with mode():
        before = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        loss = recording.replay()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert gradients(loss, recording.model).keys() == {"one.weight", "one.bias"}


def test_a_replay_that_stops_in_no_grad_code_leaves_the_grad_mode() -> None:
    recording = recorded("no_grad")

    def stop(node: torch.fx.Node, value: Any) -> None:
        if not torch.is_grad_enabled():
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        recording.replay(stop)
    assert torch.is_grad_enabled()


def test_a_step_that_ends_in_no_grad_code_leaves_the_grad_mode() -> None:
    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = m(x).sum()
        with torch.no_grad():
            value.exp()
        return value

    task = workload(CONSTRUCTS["dropout"])
    recording = record(Workload(model=task.model, batches=task.batches, loss=loss))
    recording.graph_module(*recording.inputs)
    assert torch.is_grad_enabled()


def test_sites_count_per_call_of_a_module() -> None:
    recording = recorded("shared module")
    calls = recording.op_graph.calls_of(recording.op_graph.sites()[0])
    assert [(str(node.site), node.call) for node in calls] == [("one:linear#0", 0), ("one:linear#0", 1)]
    assert sites("shared module") == ["one:linear#0", ":gelu#0", "@loss:square#0", "@loss:mean#0", "@loss:add#0"]


def test_composites_are_entered() -> None:
    found = sites("multi-head attention")
    assert "attend:linear#0" in found
    assert "attend:softmax#0" in found
    assert not any("multi_head" in site for site in found)


def test_a_call_under_no_grad_is_left_alone_and_counted() -> None:
    graph = recorded("no_grad").op_graph
    left_alone = {str(node.site): node.left_alone for node in graph.calls() if node.op == "mul"}
    assert left_alone == {":mul#0": True, ":mul#1": False, ":mul#2": False}


def test_a_write_through_a_view_orders_the_reader_after_it() -> None:
    graph = recorded("write through a view").op_graph
    (writer,) = (node for node in graph if node.op == "copy")
    assert [graph[name].op for name in graph.digraph.successors(writer.name)] == ["linear"]


def test_a_custom_function_is_one_call() -> None:
    graph = recorded("custom function").op_graph
    assert [node.op for node in graph if node.left_alone] == ["Twice"]
    assert not any(node.op == "mul" for node in graph)


def test_integer_calls_have_no_site() -> None:
    assert not any(site.op == "add" and site.module == "norm" for site in recorded("batch norm").op_graph.sites())


def test_buffers_are_as_before_the_step() -> None:
    recording = recorded("batch norm")
    assert torch.equal(recording.model.get_buffer("norm.running_mean"), torch.zeros(4))
    assert recording.model.get_buffer("norm.num_batches_tracked").item() == 0
    recording.replay()
    assert torch.equal(recording.model.get_buffer("norm.running_mean"), torch.zeros(4))
    assert torch.equal(recording.model.get_buffer("norm.running_var"), torch.ones(4))


def test_forwards_are_restored_also_after_an_exception() -> None:
    models: list[nn.Module] = []

    def run(m: Body, x: torch.Tensor) -> torch.Tensor:
        models.append(m)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        record(workload(run))
    assert not any("forward" in module.__dict__ for module in models[0].modules())
    assert "apply_once" not in repr(torch.autograd.Function.apply)


def test_nodes_carry_shapes_constants_and_source() -> None:
    graph = recorded("plain tensor").op_graph
    (mul,) = (node for node in graph.calls() if node.op == "mul")
    assert [meta.shape for meta in mul.inputs] == [(3, 4), (4,)]
    assert mul.outputs[0].dtype == "float32"
    assert mul.outputs[0].requires_grad
    assert "test_recording.py:" in mul.source
    (add,) = (node for node in graph.calls() if node.op == "add")
    assert add.constants == (0.1,)


def test_tied_weights_have_one_node() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.embed(ids))
            return logits

    ids = torch.arange(5)
    task = Workload(model=Tied, batches=lambda: [ids], loss=lambda m, x: F.cross_entropy(m(x), x))
    recording = record(task)
    assert recording.replay_matches
    assert [n.target for n in recording.op_graph if n.kind == "parameter"] == ["embed.weight"]


def test_what_only_queries_read_has_no_node() -> None:
    def run(m: Body, x: torch.Tensor) -> torch.Tensor:
        assert m.offset.shape == m.plain.shape
        y: torch.Tensor = m.one(x)
        return y

    assert {node.kind for node in record(workload(run)).op_graph} == {"input", "parameter", "op", "output"}


def test_the_fingerprint_tells_architectures_apart_and_nothing_else() -> None:
    prints = [recorded(name).op_graph.fingerprint() for name in ("dropout", "dropout", "shared module")]
    assert prints[0] == prints[1] != prints[2]


def test_the_callers_random_state_is_untouched() -> None:
    state = torch.get_rng_state()
    recorded("dropout")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, x: 1.0, "returned a float; it must return a scalar tensor that requires grad"),
        (lambda m, x: m(x), r"returned a tensor of shape \(3, 4\); it must"),
        (lambda m, x: m(x).sum().detach(), "does not require grad .computed under no_grad"),
        (lambda m, x: m(x).sum().long(), "returned a tensor of int64"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss: Any, message: str) -> None:
    task = workload(CONSTRUCTS["dropout"])
    with pytest.raises(WorkloadError, match=message):
        record(Workload(model=task.model, batches=task.batches, loss=loss))


def test_a_workload_that_autocasts_itself_is_refused() -> None:
    def run(m: Body, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = m.one(x)
            return y

    with pytest.raises(CaptureError, match=r"test_recording.py:\d+ runs under torch.autocast.*remove autocast"):
        record(workload(run))


def test_a_module_may_be_called_as_an_attribute_of_fx_graph_modules_is() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.graph = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.graph(self.code(x))

    workload = Workload(model=Model, batches=lambda: [torch.ones(2, 4)], loss=lambda model, batch: model(batch).sum())
    recording = record(workload)
    assert recording.replay_matches
    assert next(node.target for node in recording.op_graph if node.kind == "parameter") == "code.weight"


def test_attributes_are_told_by_their_names_in_the_model() -> None:
    recording = record(workload(lambda m, x: m.one(x) + m.offset))
    assert recording.attribute("one.weight") is recording.model.get_parameter("one.weight")
    assert recording.attribute("offset") is recording.model.get_buffer("offset")
    assert recording.attribute("two.weight") is None  # which the step does not read
    targets = [str(node.target) for node in recording.graph_module.graph.nodes if node.op == "get_attr"]
    assert {attribute_name(each) for each in targets} == {"one.weight", "one.bias", "offset"}
