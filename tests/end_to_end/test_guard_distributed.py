"""A guard on two gloo ranks: all decide alike, whatever only one of them sees."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autoprec.errors import ApplyError
from autoprec.policy import LossScale, Parameters
from tests.faults.guard_faults import Exploding, train_with_an_odd_rank
from tests.faults.guarded import Loop, batch_at, loss_of, policy_of

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
    pytest.mark.slow,
]
SCALED = LossScale(kind="dynamic", initial=256.0)
MASTERS = Parameters(storage="bf16", master="fp32", gradients="storage")


def loop_of(policy: Any, **options: Any) -> Loop:
    loop = Loop(policy, **options)
    wrapped = DistributedDataParallel(loop.model)
    loop.loss_of = lambda model, batch: loss_of(wrapped if model is loop.model else model, batch)
    return loop


def facts(loop: Loop) -> dict[str, Any]:
    return {
        "findings": loop.findings,
        "sites": [event.site for event in loop.events],
        "stepped": [outcome.stepped for outcome in loop.outcomes],
        "weights": [each.detach().float().numpy().tobytes() for each in loop.model.parameters()],
        "rules": [rule.sites for rule in loop.guard.policy.rules],
        "position": loop.guard.position,
    }


def bad_batch_of_one(rank: int, bad: int, scaled: bool) -> dict[str, Any]:
    """Rank `bad` gets batches that overflow a site in fp16; the others do not."""
    loop = loop_of(policy_of("fp16", scale=SCALED if scaled else None)).train(3)
    for step in range(3, 7):
        x, y = batch_at(step)
        loop.step((x * (1e6 if rank == bad else 1.0), y), max_norm=1.0)
    return facts(loop)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_that_one_rank_sees_is_promoted_by_all(ranks, bad, scaled):
    ours, theirs = ranks.run(bad_batch_of_one, bad, scaled)
    assert ours["stepped"] == theirs["stepped"] == [True] * 3 + [False] * 3 + [True]
    assert ours["weights"] == theirs["weights"]
    assert ours["rules"] == theirs["rules"] == ["0:linear", "0:linear", "*"]
    assert ours["findings"][-1][1] == theirs["findings"][-1][1] == "promote"


def nan_batches_of_one(rank: int) -> dict[str, Any]:
    loop = loop_of(policy_of("bf16")).train(3)
    for step in range(3, 8):
        x, y = batch_at(step)
        loop.step((x * (torch.nan if rank == 1 else 1.0), y))
    return facts(loop)


def test_a_batch_that_is_broken_on_one_rank_promotes_nothing(ranks):
    ours, theirs = ranks.run(nan_batches_of_one)
    assert ours["rules"] == theirs["rules"] == ["0:linear", "*"]
    assert ours["stepped"] == theirs["stepped"] == [True] * 3 + [False] * 5
    assert {reaction for _, reaction in ours["findings"] + theirs["findings"]} == {"warn"}


def infinite_loss_of_one(rank: int) -> dict[str, Any]:
    """The loss of rank 1 is infinite by a constant: its gradients are finite, and so is the update."""
    loop = loop_of(policy_of("bf16"), reactions=["warn"]).train(3)
    finite = loop.loss_of
    loop.loss_of = lambda model, batch: finite(model, batch) + (torch.inf if rank == 1 else 0.0)
    loop.train(4)
    return facts(loop)


def test_gradients_decide_and_a_loss_that_one_rank_sees_is_told_by_all(ranks):
    ours, theirs = ranks.run(infinite_loss_of_one)
    assert ours["stepped"] == theirs["stepped"] == [True] * 7
    assert ours["weights"] == theirs["weights"]
    assert ours["findings"] == theirs["findings"] == [("non_finite_loss", "warn")]


def test_a_rank_that_went_its_own_way_is_brought_back(ranks):
    ours, theirs = ranks.run(train_with_an_odd_rank)
    assert list(ours) == list(theirs) == [("ranks", "restore")]


def masters_under_ddp(rank: int) -> dict[str, Any]:
    loop = loop_of(policy_of("fp16", low="*", parameters=MASTERS)).train(2)
    for step in range(2, 5):
        x, y = batch_at(step)
        loop.step((x * 1e6, y))
    told = facts(loop)
    with pytest.raises(ApplyError, match='exchange: "fp16" stores parameters in another format'):
        loop.guard._run.fall_back()
    loop.train(2)
    return {**told, "weights": facts(loop)["weights"], "is_finite": loop.is_finite}


def test_masters_stay_under_ddp_and_a_fallback_that_would_move_them_is_refused(ranks):
    ours, theirs = ranks.run(masters_under_ddp)
    assert ours["findings"][-1] == ("non_finite_loss", "promote")
    assert ours["weights"] == theirs["weights"]
    assert ours["is_finite"]


def collapsing(rank: int) -> dict[str, Any]:
    loop = loop_of(policy_of("fp16", scale=LossScale(kind="dynamic", initial=8.0))).train(2)
    finite = loop.loss_of
    loop.loss_of = lambda model, batch: Exploding.apply(finite(model, batch)) if rank == 1 else finite(model, batch)
    for step in range(2, 7):
        loop.step(batch_at(step))
    return facts(loop)


def test_a_collapse_on_one_rank_is_one_on_all(ranks):
    ours, theirs = ranks.run(collapsing)
    assert ours["findings"] == theirs["findings"]
    assert ours["findings"][0] == ("loss_scale_collapse", "fallback")


def sharded(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    loop = Loop(policy_of("bf16"), reactions=["warn"])
    for part in (loop.model[0], loop.model[3], loop.model):
        fully_shard(part)
    loop.optimizer.param_groups[0]["params"] = list(loop.model.parameters())
    loop.train(2)
    if rank == 1:  # only its shard of a gradient is broken
        loop.model[0].weight.register_hook(lambda gradient: gradient)
    loop.optimizer.zero_grad()
    loss = loss_of(loop.model, batch_at(2))
    loop.precision.backward(loss)
    if rank == 1:
        loop.model[0].weight.grad.to_local().fill_(torch.nan)
    outcome = loop.guard.step(loss)
    return {"stepped": outcome.stepped, "findings": loop.findings}


def test_a_shard_that_is_not_finite_stops_the_step_of_all(ranks):
    ours, theirs = ranks.run(sharded)
    assert (ours["stepped"], theirs["stepped"]) == (False, False)
    assert ours["findings"] == theirs["findings"] == [("non_finite_gradient", "warn")]


def update_of_one(rank: int, bad: int) -> dict[str, Any]:
    """Adam without eps on two ranks, of which one alone ends with a weight that is not finite."""
    loop = loop_of(policy_of("fp32"), kind=functools.partial(torch.optim.Adam, eps=0.0)).train(2)
    step = loop.optimizer.step

    def broken_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if rank == bad:
            with torch.no_grad():
                loop.model[3].bias.fill_(torch.inf)
        return result

    loop.optimizer.step = broken_step  # type: ignore[method-assign]
    loop.step(batch_at(2))
    loop.optimizer.step = step  # type: ignore[method-assign]
    loop.step(batch_at(3))
    return facts(loop)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_update_that_is_not_finite_on_one_rank_is_undone_on_all(ranks, bad):
    ours, theirs = ranks.run(update_of_one, bad)
    assert ours["stepped"] == theirs["stepped"] == [True, True, False, True]
    assert ours["weights"] == theirs["weights"]
    assert [each for each in ours["findings"] if each[0] != "guard"] == [("non_finite_update", "warn")]
    assert (ours, theirs)[bad]["sites"][-1] == "3.bias"
    assert (ours, theirs)[1 - bad]["sites"][-1] == "a parameter of another rank"


def sharded_update(rank: int) -> dict[str, Any]:
    """Adam without eps steps on shards, of which that of rank 1 has nothing but zeros to divide by zeros."""
    from torch.distributed.fsdp import fully_shard

    loop = Loop(policy_of("bf16"), kind=functools.partial(torch.optim.Adam, eps=0.0), reactions=["warn"])
    for part in (loop.model[0], loop.model[3], loop.model):
        fully_shard(part)
    loop.optimizer.param_groups[0]["params"] = list(loop.model.parameters())
    before = [each.to_local().clone() for each in loop.model.parameters()]
    loss = loss_of(loop.model, batch_at(0))
    loop.precision.backward(loss)
    for each in loop.model.parameters():
        each.grad.to_local().fill_(float(rank == 0))
    outcome = loop.guard.step(loss)
    same = all(torch.equal(one, two.to_local()) for one, two in zip(before, loop.model.parameters(), strict=True))
    return {"stepped": outcome.stepped, "findings": loop.findings, "same": same, "state": len(loop.optimizer.state)}


def test_a_shard_whose_update_is_not_finite_undoes_the_step_of_all(ranks):
    ours, theirs = ranks.run(sharded_update)
    assert ours == theirs == {"stepped": False, "findings": [("non_finite_update", "warn")], "same": True, "state": 0}
