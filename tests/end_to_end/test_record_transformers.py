"""Recording real architectures: the replay of each equals the recorded loss bit for bit, in train mode."""

import pytest

from autoprec.capture import record
from autoprec.workload import Workload
from tests.tiny_models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_replay_matches(name: str) -> None:
    model, batch = MODELS[name]()
    workload = Workload(model=model, batches=lambda: [batch], loss=lambda m, b: m(**b).loss)
    recording = record(workload)
    assert recording.model.training
    assert recording.replay_matches
    assert len(recording.op_graph.sites()) >= 10
    assert recording.graph_module(*recording.inputs).requires_grad
