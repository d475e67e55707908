"""What a workload's functions must return."""

import pytest
import torch

from autoprec.errors import WorkloadError
from autoprec.workload import Workload
from autoprec.workload.parts import build_model, build_optimizer


def test_a_model_must_be_a_module():
    task = Workload(model=lambda: 3, batches=list)
    with pytest.raises(WorkloadError, match=r"model\(\) returned an int; it must return a fresh torch.nn.Module"):
        build_model(task, "cpu")


def test_an_optimizer_must_be_one():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(WorkloadError, match=r"optimizer\(params\) returned a NoneType; .* torch.optim.Optimizer"):
        build_optimizer(lambda params: None, model)
    assert isinstance(build_optimizer(torch.optim.SGD, model), torch.optim.SGD)
