"""Plans that are kept beside a study."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoprec.search.fronts import Fronts, front_of
from autoprec.search.stored_fronts import keep_fronts, kept_fronts
from tests.op_graphs import chain, node
from tests.unit.search.test_fronts import GRAPH, errors, model


def fronts(**low_s: float) -> Any:
    front = front_of(model(**low_s), "bf16", errors(linear=1e-4, linear_1=1e-2), kept=())
    return Fronts(by_format={"bf16": front}, cost_model=SimpleNamespace())  # type: ignore[arg-type]


def test_a_resumed_run_goes_on_with_the_plans_it_had(tmp_path: Path) -> None:
    path = tmp_path / "fronts.json"
    first, other = fronts(linear=1e-3, linear_1=1e-3), fronts(linear=1e-3)
    assert first.by_format["bf16"].plans != other.by_format["bf16"].plans
    keep_fronts(first, GRAPH, path)
    again = kept_fronts(other, GRAPH, path)
    assert again.by_format["bf16"].plans == first.by_format["bf16"].plans
    assert again.cost_model is other.cost_model


def test_plans_beyond_the_marks_are_kept_too_and_a_file_without_them_has_none(tmp_path: Path) -> None:
    path = tmp_path / "fronts.json"
    first, other = fronts(linear=1e-3, linear_1=1e-3), fronts(linear=1e-3)
    (plan, *_) = first.by_format["bf16"].plans
    beyond = replace(first, by_format={"bf16": replace(first.by_format["bf16"], beyond=(plan,))})
    keep_fronts(beyond, GRAPH, path)
    assert kept_fronts(other, GRAPH, path).by_format["bf16"].beyond == (plan,)
    old = json.loads(path.read_text())
    del old["beyond"]
    path.write_text(json.dumps(old))
    assert kept_fronts(beyond, GRAPH, path).by_format["bf16"].beyond == ()


def test_plans_of_another_graph_or_a_damaged_file_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "fronts.json"
    first, other = fronts(linear=1e-3, linear_1=1e-3), fronts(linear=1e-3)
    assert kept_fronts(other, GRAPH, path) is other
    keep_fronts(first, chain(node("tanh", "tanh")), path)
    assert kept_fronts(other, GRAPH, path) is other
    path.write_text("{")
    assert kept_fronts(other, GRAPH, path) is other
