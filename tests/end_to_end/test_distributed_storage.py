"""Low parameters and memory formats under DistributedDataParallel, on two gloo ranks."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec.errors import ApplyError
from autoprec.policy import Policy, Rule
from autoprec.runtime import apply
from tests.two_ranks import TwoRanks
from tests.unit.runtime.storing import MASTER, STOCHASTIC, batch, net, same, storing, weights

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)


def trained(rank: int, settings: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return weights and gradients after three steps on batches that are this rank's own."""
    model = net()
    apply(model, storing(**settings, gradients="storage"))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(10 * step + rank)).square().mean().backward()
        optimizer.step()
    return [*weights(model), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("settings", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
def test_ranks_that_see_other_data_keep_equal_weights(ranks: TwoRanks, settings: Mapping[str, Any]) -> None:
    """Gradients are averaged in every step, not only before the first one, and replicas round alike."""
    one, two = ranks.run(trained, settings)
    assert same(one, two)


def refused(rank: int) -> str:
    """Return what a training step in DistributedDataParallel is refused with; alone the model trains."""
    model = net()
    apply(model, storing(**MASTER))
    message = ""
    try:
        DistributedDataParallel(model)(batch(0)).square().mean().backward()
    except ApplyError as error:
        message = str(error)
    model(batch(0)).square().mean().backward()
    return message


def test_gradients_accumulated_in_fp32_are_refused(ranks: TwoRanks) -> None:
    for message in ranks.run(refused):
        assert "accumulates their gradients in fp32, and DistributedDataParallel reduces gradients in the" in message
        assert "add gradients: storage to the policy's parameters" in message


LOW = Policy(name="low", rules=(Rule(sites="*", format="bf16"),))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.deep, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.deep(self.enter(x).relu()).mean((2, 3)))
        return y


def channels_last(rank: int, wraps: bool) -> tuple[list[torch.Tensor], list[bool]]:
    """Return weights and gradients after two steps on equal batches, and whether each weight is channels_last."""
    torch.manual_seed(0)
    model = Images()
    apply(model, replace(LOW, memory_format="channels_last"))
    called = DistributedDataParallel(model) if wraps else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        called(x).square().mean().backward()
        optimizer.step()
    layouts = [p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4]
    return copy.deepcopy([*weights(model), *(p.grad for p in model.parameters() if p.grad is not None)]), layouts


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning")  # it costs a copy
def test_channels_last_under_ddp_is_the_single_process(ranks: TwoRanks) -> None:
    (ours, layouts), (theirs, _) = ranks.run(channels_last, True)[0], ranks.run(channels_last, False)[0]
    assert layouts == [True, True]
    assert same(ours, theirs)
