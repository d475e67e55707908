"""Clipping gradients before they are unscaled is refused under FSDP2 too, where torch counts no such write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import autoprec
from autoprec.errors import ScalingError
from autoprec.policy import LossScale, Policy, Rule
from tests.two_ranks import TwoRanks

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
    pytest.mark.slow,
]


def by_norm(parameters: list[nn.Parameter], foreach: bool | None) -> None:
    """Clip as everybody does, with a function that was imported before any policy was applied."""
    clip_grad_norm_(iter(parameters), 1e-3, foreach=foreach)


def by_total_norm(parameters: list[nn.Parameter], foreach: bool | None) -> None:
    total = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, 1e-3, total, foreach=foreach)


def by_value(parameters: list[nn.Parameter], foreach: bool | None) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 1e-3, foreach=foreach)


CLIPS: tuple[Callable[[list[nn.Parameter], bool | None], None], ...] = (by_norm, by_total_norm, by_value)


def clipped(rank: int) -> Any:
    """Return what a step says of each kind of clipping before, then after unscaling, and of none."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scale = LossScale(kind="static", initial=64.0)
    precision = autoprec.apply(model, Policy(name="scaled", rules=(Rule(sites="*", format="bf16"),), loss_scale=scale))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, answers = list(model.parameters()), []
    for clip in (*CLIPS, None):
        for foreach in (None, False):
            for unscales in (False, True):
                precision.backward(model(torch.ones(2, 4)).sum())
                if unscales:
                    precision.scaler.unscale_(optimizer)
                if clip is not None:
                    clip(parameters, foreach)
                try:
                    precision.step(optimizer)
                except ScalingError as error:
                    answers.append("changed after the backward pass" in str(error))
                else:
                    answers.append(False)
                optimizer.zero_grad()
    return answers


def test_clipping_scaled_gradients_is_refused_on_both_ranks(ranks: TwoRanks) -> None:
    for answers in ranks.run(clipped):
        assert answers == [True, False] * (2 * len(CLIPS)) + [False, False] * 2
