"""Ranges hold on architectures of others: no value of a replay lies outside the interval of its node."""

import pytest

from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.ranges import ranges_of
from autoprec.capture import record
from autoprec.workload import Workload
from tests.soundness import violations
from tests.tiny_models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_value_lies_in_the_interval_of_its_node(name: str) -> None:
    build, batch = MODELS[name]()
    recording = record(Workload(model=build, batches=lambda: [batch], loss=lambda model, given: model(**given).loss))
    graph = recording.op_graph
    known = ranges_of(graph, extremes_of(recording))
    assert violations(recording, known) == []
    assert violations(recording, ranges_of(graph)) == []
    ops = [node.name for node in graph if node.kind == "op" and node.outputs]
    assert sum(known[each].is_finite for each in ops) > 0.3 * len(ops)  # bounds that say something
