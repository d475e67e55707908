from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoprec.errors import WorkloadError
from autoprec.workload import Workload


def test_a_workload_needs_only_a_model_and_batches():
    workload = Workload(model=lambda: nn.Linear(1, 1), batches=list)
    optimizer = workload.optimizer(workload.model().parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": nn.Linear(1, 1)}, r"model=\.\.\.\) is a Linear instance.*fresh module"),
        ({"model": "gpt"}, r"model=\.\.\.\) is a str.*fresh module"),
        ({"batches": [1]}, r"batches=\.\.\.\) is a list.*new iterable"),
        ({"loss": None}, r"loss=\.\.\.\) is a NoneType.*scalar tensor"),
        ({"optimizer": 1e-3}, r"optimizer=\.\.\.\) is a float.*returns an optimizer"),
        ({"evaluate": 1.0}, r"evaluate=\.\.\.\) is a float.*smaller is better, or None"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(fields, message):
    with pytest.raises(WorkloadError, match=message):
        Workload(**{"model": lambda: nn.Linear(1, 1), "batches": list, **fields})


def test_the_default_loss_is_the_models_own():
    workload = Workload(model=lambda: nn.Linear(1, 1), batches=list)
    loss = torch.ones(())
    assert workload.loss(lambda ids, labels: SimpleNamespace(loss=loss), {"ids": 1, "labels": 2}) is loss


def test_the_default_loss_refuses_batches_that_are_no_mapping():
    workload = Workload(model=lambda: nn.Linear(1, 1), batches=list)
    with pytest.raises(WorkloadError, match=r"a batch is a tuple, not a mapping; give Workload\(loss="):
        workload.loss(nn.Linear(1, 1), (1, 2))


def test_the_default_loss_refuses_a_model_that_returns_none():
    workload = Workload(model=lambda: nn.Linear(1, 1), batches=list)
    with pytest.raises(
        WorkloadError, match=r"function returned no loss for a batch with the keys \['ids'\]; add the lab"
    ):
        workload.loss(lambda ids: SimpleNamespace(loss=None), {"ids": 1})
