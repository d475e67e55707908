"""TensorFlow's graph pass as a policy: painted by hand here, on small graphs, and compact on real ones."""

from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec import Workload
from autoprec.analysis.classes import numerics_classes
from autoprec.capture import record
from autoprec.errors import PolicyFileError
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.propagate import paint
from autoprec.policy import LossScale, load_policy, resolve, save_policy
from autoprec.search.graph_pass import graph_pass, policy_for
from autoprec.search.layout import lowerable_sites
from tests.op_graphs import chain, node, op_graph
from tests.tiny_models import MODELS


class Tagger(nn.Module):
    """An LSTM over embeddings and a head that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.head(self.lstm(self.embed(ids))[0]).relu())
        return y


def recorded(name: str) -> OpGraph:
    if name == "RNN":
        run = Workload(
            model=Tagger,
            batches=lambda: [torch.arange(5).view(5, 1)],
            loss=lambda model, ids: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 4),
        )
    else:
        build, batch = MODELS[name]()
        run = Workload(model=build, batches=lambda: [batch], loss=lambda model, batch: model(**batch).loss)
    return record(run, device="cpu").op_graph


def formats(graph: OpGraph) -> dict[str, str]:
    return {str(site): fmt for site, fmt in resolve(graph_pass(graph, "bf16", "cpu"), graph.sites()).formats.items()}


def test_allow_infer_deny_and_clear() -> None:
    graph = chain(
        node("before", "mul"),  # infer, and no allow op before it
        node("first", "linear"),
        node("between", "add"),  # infer between two allow ops
        node("second", "linear"),
        node("after", "relu"),  # clear follows an allow op
        node("last", "mul", index=1),  # infer after the last allow op
        node("bad", "exp"),  # deny
        node("worse", "add", index=1),  # infer contaminated by it
        node("kept", "neg"),  # clear after that, and before nothing that matters
    )
    assert formats(graph) == {
        ":mul#0": "fp32",
        ":linear#0": "bf16",
        ":add#0": "bf16",
        ":relu#0": "bf16",
        ":mul#1": "fp32",
        ":exp#0": "fp32",
        ":add#1": "fp32",
        ":neg#0": "fp32",
    }


def test_a_site_with_one_call_painted_fp32_is_fp32() -> None:
    graph = op_graph(
        [
            node("a", "linear", module="m"),
            node("low", "add", module="shared", call=0),
            node("b", "linear", module="m", index=1),
            node("bad", "exp"),
            node("high", "add", module="shared", call=1),
        ],
        [("a", "low"), ("low", "b"), ("b", "bad"), ("bad", "high")],
    )
    assert formats(graph)["shared:add#0"] == "fp32"


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["CNN", "GPT-2", "Llama", "RNN"])
def test_rules_say_what_is_painted_and_all_win(name: str, low: str) -> None:
    graph = recorded(name)
    policy = graph_pass(graph, low, "cpu")
    resolved = resolve(policy, graph.sites())
    resolved.check_alive()
    movable = lowerable_sites(graph)
    painted = paint(graph.digraph, numerics_classes(graph))
    for site in movable:
        colors = {painted[call.name].color for call in graph.calls_of(site) if call.name in painted}
        assert resolved.format(site) == ("fp32" if "fp32" in colors else low), site
    assert {resolved.format(site) for site in movable} == {"fp32", low}
    assert len(policy.rules) <= 12 < len(movable) or name in ("CNN", "RNN")
    assert all(rule.why for rule in policy.rules if rule.format == "fp32" and rule.sites != "*")
    assert policy.loss_scale.kind == ("dynamic" if low == "fp16" else "none")
    assert policy.loss_scale == LossScale() or policy.loss_scale.initial == 2.0**15


def test_why_names_what_makes_a_site_fp32() -> None:
    graph = chain(node("a", "linear"), node("bad", "exp"), node("add", "add"), node("b", "linear", index=1))
    whys = {rule.sites: rule.why for rule in graph_pass(graph, "bf16", "cpu").rules}
    assert "exp turns into a factor" in whys["*:exp"]
    assert whys["*:add"] == "reads the result of :exp#0 directly, which is FP32 by default"
    alone = {
        rule.sites: rule.why for rule in graph_pass(chain(node("m", "mul"), node("a", "linear")), "bf16", "cpu").rules
    }
    assert alone["*:mul"].startswith("between no two matmuls or convolutions by way of low ops")


def test_a_policy_for_a_graph_by_name_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(node("a", "linear"), node("bad", "exp"))
    made = {name: graph_pass(graph, name[-4:], "cpu") for name in ("tf-graph-pass-bf16", "tf-graph-pass-fp16")}
    assert {name: policy_for(name, "cpu", graph) for name in made} == made
    assert policy_for("fp32", "cpu", graph).name == "fp32"
    monkeypatch.chdir(tmp_path)
    save_policy(made["tf-graph-pass-bf16"], "tf-graph-pass-fp16")
    assert policy_for("tf-graph-pass-fp16", "cpu", graph) == load_policy("tf-graph-pass-fp16")
    with pytest.raises(PolicyFileError, match="made for a workload: tf-graph-pass-bf16, tf-graph-pass-fp16"):
        policy_for("tf-graph-pas", "cpu", graph)
