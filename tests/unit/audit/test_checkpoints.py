"""Checkpoints of users are read with care; two of ours are told apart by their bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.audit.checkpoints import differences, model_state
from autoprec.errors import WorkloadError
from tests.faults import planted_models as models
from tests.faults.audit_faults_b import LINEAR_BF16, Planted, audited


class Foreign:
    """Stands for code that a checkpoint must not run."""


def state_of(saved: Any, folder: Path) -> Any:
    given = audited(Planted(workload=models.workload(), policy=LINEAR_BF16), folder)
    if saved is not None:
        torch.save(saved, folder / "step.pt")
    return model_state(folder / "step.pt", given)


@pytest.mark.parametrize("key", [None, "model", "model_state_dict", "state_dict"])
def test_a_state_dict_is_found(key: str | None, tmp_path: Path) -> None:
    state = models.Net().state_dict()
    found = state_of(state if key is None else {key: state, "step": 3}, tmp_path)
    assert torch.equal(found["head.weight"], state["head.weight"])


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (None, "there is no checkpoint"),
        (Foreign(), "weights_only=True"),
        ([1, 2], "holds list; allowed: model.state_dict"),
        (nn.Linear(2, 2).state_dict(), 'lacks "head.bias"'),
        ({**models.Net().state_dict(), "extra": torch.ones(1)}, 'has "extra", which the model has not'),
        ({**models.Net().state_dict(), "head.bias": torch.ones(7)}, '"head.bias" is 7 there and 4 here'),
        ({**models.Net().state_dict(), "head.bias": 7}, '"head.bias" is no tensor there and 4 here'),
    ],
)
def test_what_is_no_checkpoint_of_this_model_is_refused(saved: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="checkpoint") as caught:
        state_of(saved, tmp_path)
    assert said in str(caught.value)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(WorkloadError, match="cannot be read"):
        state_of(None, tmp_path)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": torch.tensor([1.0, float("nan")])}, {"a": torch.tensor([1.0, float("nan")])}, []),
        ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.5])}, [("a", 0.5)]),
        ({"a": [torch.tensor([0.0])]}, {"a": [torch.tensor([-0.0])]}, [("a.0", 0.0)]),
        ({"a": torch.tensor([1])}, {"a": torch.tensor([2])}, [("a", float("inf"))]),
        ({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}, [("a", float("inf"))]),
        ({"a": 1.5, "b": float("nan")}, {"a": 1.25, "b": float("nan")}, [("a", 0.25)]),
        ({"a": {"b": 1}}, {"a": {}}, [("a.b", float("inf"))]),
        ({"a": None}, {"a": None}, []),
    ],
)
def test_differences(one: Any, other: Any, found: list[tuple[str, float]]) -> None:
    assert list(differences(one, other)) == found
