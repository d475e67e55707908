"""Data parallel training under a policy, on two gloo ranks: it is the single-process run, bit for bit where it can be.

Equal batches on both ranks make it so: the mean of two equal FP32 gradients is that gradient, exactly. Whatever else
would differ (a stale or corrupted weight cast, a hook of FSDP's that was cast, a collective in a lower format) shows.
"""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.errors import ApplyError
from autoprec.policy import LossScale, Parameters, Policy, Rule
from tests.two_ranks import TwoRanks

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
    pytest.mark.slow,
]

OPTIONS = [
    {},
    pytest.param({"reshard_after_forward": False}, marks=pytest.mark.long),
    pytest.param({"per_block": False}, marks=pytest.mark.long),
]
MIXED = Policy(
    name="mixed",
    rules=(
        Rule(sites="blocks.0.norm", format="fp32"),
        Rule(sites="*:gelu", format="fp16"),
        Rule(sites="head", format="fp32"),
        Rule(sites="*", format="bf16"),
    ),
)
POLICIES: dict[str, Policy | str] = {"mixed": MIXED, "autocast-bf16": "autocast-bf16"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(F.gelu(self.rise(self.norm(x))))


class Net(nn.Module):
    """Two blocks, a linear that is called as often as it is told to, and one that is not always used."""

    def __init__(self, *, checkpointed: bool = False, uses_spare: bool = True, shared_calls: int = 1) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(4, 8), nn.ModuleList([Block(), Block()])
        self.shared, self.head, self.spare = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.checkpointed, self.uses_spare, self.shared_calls = checkpointed, uses_spare, shared_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        for _ in range(self.shared_calls):
            x = torch.tanh(self.shared(x))
        y: torch.Tensor = self.head(x + self.spare(x) if self.uses_spare else x)
        return y


def batch_of(step: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, precision: autoprec.Precision, x: torch.Tensor) -> torch.Tensor:
    with precision.loss():
        return F.mse_loss(model(x), x)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and gradients, gathered."""
    state = {name: full(value).detach().clone() for name, value in model.state_dict().items()}
    gradients = {f"{n}.grad": full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("module."): value for name, value in {**state, **gradients}.items()}


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


# DistributedDataParallel


def ddp_steps(model: nn.Module, precision: autoprec.Precision, micro_batches: int, rank: int | None) -> None:
    """Three SGD steps; `rank` None means a single process that sees the batches of both ranks in one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            x = batch_of(step * 10 + micro)
            last = micro == micro_batches - 1
            if isinstance(model, DistributedDataParallel) and not last:
                with model.no_sync():
                    loss_of(model, precision, x if rank is None else x.chunk(2)[rank]).backward()
            else:
                loss_of(model, precision, x if rank is None else x.chunk(2)[rank]).backward()
        optimizer.step()


def ddp(rank: int, policy: str, options: dict[str, Any], micro_batches: int, *, same: bool) -> Any:
    """Train under DDP and alone; return both states."""
    torch.manual_seed(0)
    model = Net(uses_spare=not options.get("find_unused_parameters"), shared_calls=2)
    alone = copy.deepcopy(model)
    precision = autoprec.apply(model, POLICIES[policy])
    ddp_steps(DistributedDataParallel(model, **options), precision, micro_batches, None if same else rank)
    ddp_steps(alone, autoprec.apply(alone, POLICIES[policy]), micro_batches, None)
    return state_of(model), state_of(alone)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [
        ({}, 1),
        ({}, 3),
        ({"find_unused_parameters": True}, 1),
        ({"static_graph": True}, 1),
        ({"gradient_as_bucket_view": True}, 2),
        ({"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}, 1),
    ],
    ids=["plain", "no_sync", "unused", "static", "bucket_view", "small_buckets"],
)
def test_ddp_on_equal_batches_is_the_single_process(
    ranks: TwoRanks, policy: str, options: dict[str, Any], micro_batches: int
) -> None:
    (first, alone), (second, _) = ranks.run(ddp_same, policy, options, micro_batches)
    assert differing(first, second) == []
    assert differing(first, alone) == []


def ddp_same(rank: int, policy: str, options: dict[str, Any], micro_batches: int) -> Any:
    return ddp(rank, policy, options, micro_batches, same=True)


def ddp_halves(rank: int, policy: str) -> Any:
    return ddp(rank, policy, {}, 2, same=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_ddp_on_half_batches_is_the_single_process_on_the_joined_batch(ranks: TwoRanks, policy: str) -> None:
    (first, alone), (second, _) = ranks.run(ddp_halves, policy)
    assert differing(first, second) == [], "ranks drift apart"
    for name, wanted in alone.items():
        # A bf16 weight gradient is rounded by 2**-9 of its size: once for the joined batch, once for each half.
        # Halves can be larger than their mean, and three steps add up; what is wrong (one rank's gradient, a sum in
        # place of a mean) is off by more than a tenth.
        assert (first[name] - wanted).abs().max() <= 2**-5 * wanted.abs().max() + 1e-6, name


def ddp_scaled(rank: int) -> Any:
    """Overflow on rank 1 in the second of four steps; return what each step left, and the scale."""
    torch.manual_seed(0)
    model = Net()
    scale = LossScale(kind="dynamic", initial=1024.0, growth_interval=2)
    precision = autoprec.apply(model, Policy(name="scaled", rules=(Rule(sites="*", format="fp16"),), loss_scale=scale))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, states = [], []
    for step in range(4):
        optimizer.zero_grad()
        x = batch_of(step)
        if (rank, step) == (1, 1):
            x = x * 1e4  # finite, and past fp16's range inside the model
        precision.scaler.scale(loss_of(parallel, precision, x)).backward()
        precision.scaler.step(optimizer)
        precision.scaler.update()
        scales.append(precision.scaler.get_scale())
        states.append({name: value.detach().clone() for name, value in model.named_parameters()})
    return scales, states


def test_ddp_skips_a_step_on_all_ranks_alike(ranks: TwoRanks) -> None:
    (scales, states), (other_scales, other_states) = ranks.run(ddp_scaled)
    assert scales == other_scales == [1024.0, 512.0, 512.0, 1024.0]
    assert all(differing(a, b) == [] for a, b in zip(states, other_states, strict=True))
    assert differing(states[0], states[1]) == []
    assert differing(states[1], states[2]) != []


def test_the_wrapper_of_ddp_is_refused_and_its_module_is_not(ranks: TwoRanks) -> None:
    message, states = ranks.run(ddp_applied_late)[0]
    assert message == (
        "apply: the model is wrapped in DistributedDataParallel, whose modules have other paths than the policy names; "
        "apply the policy to model.module; one that stores parameters low before the model is wrapped"
    )
    assert differing(*states) == []


def ddp_applied_late(rank: int) -> Any:
    torch.manual_seed(0)
    model = Net()
    alone = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    with pytest.raises(ApplyError) as refusal:
        autoprec.apply(parallel, MIXED)
    ddp_steps(parallel, autoprec.apply(parallel.module, MIXED), 1, None)
    ddp_steps(alone, autoprec.apply(alone, MIXED), 1, None)
    return str(refusal.value), (state_of(model), state_of(alone))


# FSDP1


@pytest.mark.parametrize("keeps_parameters", [True, False])
def test_fsdp1_is_the_unsharded_run(ranks: TwoRanks, *, keeps_parameters: bool) -> None:
    for losses, alone, differ, late in ranks.run(fsdp1_training, keeps_parameters):
        assert losses == alone
        assert differ == []
        assert 'module "blocks.0" is wrapped in FullyShardedDataParallel' in late
        assert "apply the policy before the model is wrapped" in late


@pytest.mark.parametrize("keeps_parameters", [True, False])
def test_low_storage_under_fsdp1_is_refused(ranks: TwoRanks, *, keeps_parameters: bool) -> None:
    message = ranks.run(fsdp1_stored_low, keeps_parameters)[0]
    if keeps_parameters:
        assert "FullyShardedDataParallel has flattened them since, without their masters; keep storage: fp32" in message
    else:  # the model holds other parameters, which the optimizer's step meets
        assert "is not the one that the policy stored low; it was exchanged since" in message


def fsdp1(model: nn.Module, *, keeps_parameters: bool = True) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")  # that FSDP2 is to be used
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=keeps_parameters,
        device_id=torch.device("cpu"),
    )


def fsdp1_training(rank: int, keeps_parameters: bool) -> Any:
    model = Net()
    twin, late = copy.deepcopy(model), copy.deepcopy(model)
    pairs = [(model, autoprec.apply(model, MIXED)), (twin, autoprec.apply(twin, MIXED))]
    sharded = fsdp1(model, keeps_parameters=keeps_parameters)
    losses: tuple[list[float], list[float]] = ([], [])
    for (_, precision), called, seen in zip(pairs, (sharded, twin), losses, strict=True):
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(called, precision, batch_of(step))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    differ: list[str] = []
    if keeps_parameters:  # else they have no names, and the losses tell
        with type(sharded).summon_full_params(sharded):
            differ = differing(dict(sharded.named_parameters()), dict(twin.named_parameters()))
    with pytest.raises(ApplyError) as refusal:
        autoprec.apply(fsdp1(late).module, MIXED)
    return losses[0], losses[1], differ, str(refusal.value)


def fsdp1_stored_low(rank: int, keeps_parameters: bool) -> str:
    model = Net()
    low = Policy(name="low", rules=MIXED.rules, parameters=Parameters(storage="bf16", master="fp32"))
    autoprec.apply(model, low)
    sharded = fsdp1(model, keeps_parameters=keeps_parameters)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

    def step() -> None:
        sharded(batch_of(0)).square().mean().backward()
        optimizer.step()

    with pytest.raises(ApplyError) as refusal:
        step()
    return str(refusal.value)


# FSDP2


def shard(model: Net, *, per_block: bool = True, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    if per_block:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model.shared, **options)
    fully_shard(model, **options)


def train_step(model: nn.Module, precision: autoprec.Precision, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, precision, batch_of(step)).backward()
    optimizer.step()


def evaluate(model: nn.Module, *, inference: bool) -> torch.Tensor:
    model.eval()
    with torch.inference_mode() if inference else torch.no_grad():
        output: torch.Tensor = model(batch_of(99)).clone()
    model.train()
    return output


def plain_training(model: nn.Module, precision: autoprec.Precision) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        train_step(model, precision, optimizer, step)
    return []


def accumulating(model: nn.Module, precision: autoprec.Precision) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == 2)
            loss_of(model, precision, batch_of(10 * step + micro)).backward()
        optimizer.step()
    return []


def evaluating(model: nn.Module, precision: autoprec.Precision) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = [evaluate(model, inference=False)]  # the very first forward is one that keeps nothing for a backward
    for step in range(2):
        train_step(model, precision, optimizer, step)
        outputs += [evaluate(model, inference=False), evaluate(model, inference=False)]
    return outputs


def several_forwards(model: nn.Module, precision: autoprec.Precision) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with precision.loss():
            first, second = model(batch_of(step)), model(batch_of(step + 5))
            loss = (first - second).square().mean()
        loss.backward()
        optimizer.step()
    return []


def clipping(model: nn.Module, precision: autoprec.Precision) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        (1000 * loss_of(model, precision, batch_of(step))).backward()
        norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 1e9)).detach())  # clips nothing, tells the norm
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
    return []


def loading(model: nn.Module, precision: autoprec.Precision) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outputs = []
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for step in range(2):
        train_step(model, precision, optimizer, step)
        outputs.append(evaluate(model, inference=False))
        model.load_state_dict(start)
        outputs.append(evaluate(model, inference=False))
    train_step(model, precision, optimizer, 7)
    return outputs


def editing(model: nn.Module, precision: autoprec.Precision) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, precision, optimizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    outputs = [evaluate(model, inference=False)]
    train_step(model, precision, optimizer, 1)
    return outputs


TRAININGS: dict[str, Callable[[nn.Module, autoprec.Precision], list[torch.Tensor]]] = {
    each.__name__: each
    for each in (plain_training, accumulating, evaluating, several_forwards, clipping, loading, editing)
}


def fsdp(rank: int, training: str, policy: str, order: str, options: dict[str, Any]) -> Any:
    """Train sharded and unsharded; return what differs."""
    torch.manual_seed(0)
    options = dict(options)
    model = Net(checkpointed=options.pop("checkpointed", False))
    alone = copy.deepcopy(model)
    if order == "before":
        precision = autoprec.apply(model, POLICIES[policy])
        shard(model, **options)
    else:
        shard(model, **options)
        precision = autoprec.apply(model, POLICIES[policy])
    outputs = TRAININGS[training](model, precision)
    wanted = TRAININGS[training](alone, autoprec.apply(alone, POLICIES[policy]))
    wrong = [place for place, (a, b) in enumerate(zip(outputs, wanted, strict=True)) if not torch.equal(a, b)]
    return wrong, differing(state_of(model), state_of(alone))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("mixed", "before"),
        ("autocast-bf16", "after"),
        pytest.param("mixed", "after", marks=pytest.mark.long),
        pytest.param("autocast-bf16", "before", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("training", TRAININGS)
def test_fsdp_is_the_unsharded_run(
    ranks: TwoRanks, training: str, policy: str, order: str, options: dict[str, Any]
) -> None:
    assert ranks.run(fsdp, training, policy, order, options) == [([], [])] * 2


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("training", TRAININGS)
def test_fsdp_with_activation_checkpointing_is_the_unsharded_run(
    ranks: TwoRanks, training: str, *, reshard: bool
) -> None:
    options = {"checkpointed": True, "reshard_after_forward": reshard}
    assert ranks.run(fsdp, training, "mixed", "before", options) == [([], [])] * 2


def fsdp_shared(rank: int, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Net(shared_calls=2)
    alone = copy.deepcopy(model)
    precision = autoprec.apply(model, MIXED)
    shard(model, **options)
    loss_of(model, precision, batch_of(0)).backward()
    loss_of(alone, autoprec.apply(alone, MIXED), batch_of(0)).backward()
    return state_of(model), state_of(alone)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fsdp_of_a_module_called_twice_loses_no_gradient(ranks: TwoRanks, options: dict[str, Any]) -> None:
    for sharded, alone in ranks.run(fsdp_shared, options):
        for name, wanted in alone.items():
            # One cast for both calls adds their gradients in bf16, one cast a call in FP32: half an ulp apart,
            # of a sum that may be smaller than what is added. A gradient that is lost is half of the sum.
            bound = 2**-6 if name.startswith("shared.") else 0.0
            assert (sharded[name] - wanted).abs().max() <= bound * wanted.abs().max(), name


def fsdp_mixed(rank: int, order: str, low: str, per_block: bool) -> Any:
    """One step with a `MixedPrecisionPolicy` and with casts written by hand; return both gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = torch.bfloat16 if low == "bf16" else torch.float16
    torch.manual_seed(0)
    model = Net()
    alone = copy.deepcopy(model)
    policy = Policy(name="uniform", rules=(Rule(sites="*", format=low),))
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if order == "after":
        shard(model, per_block=per_block, **options)
    precision = autoprec.apply(model, policy)
    if order == "before":
        shard(model, per_block=per_block, **options)
    outputs, gradients = [], []
    for step in range(2):
        y = model(batch_of(step))
        y.square().mean().backward()
        low_parameters = {name: value.to(dtype) for name, value in alone.named_parameters()}
        by_hand = torch.func.functional_call(alone, low_parameters, (batch_of(step).to(dtype),))
        by_hand.float().square().mean().backward()
        outputs.append((y.detach(), by_hand.float().detach()))
    del precision
    gradients = [state_of(model), state_of(alone)]
    return outputs, gradients


@pytest.mark.parametrize("per_block", [True, False])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_fsdp_with_its_own_mixed_precision_is_the_model_in_that_format(
    ranks: TwoRanks, order: str, low: str, *, per_block: bool
) -> None:
    for outputs, (sharded, by_hand) in ranks.run(fsdp_mixed, order, low, per_block):
        assert all(torch.equal(ours, theirs) for ours, theirs in outputs)
        assert differing(sharded, by_hand) == []


def fsdp_exported(rank: int) -> Any:
    """Shard as the export says; return what each module was gathered in, and whether a step changed the parameters."""
    from torch.distributed.fsdp import fully_shard

    from autoprec.runtime.export import fsdp2_policies

    torch.manual_seed(0)
    model = Net()
    rules = Policy(name="e", rules=(Rule(sites="head", format="fp32"), Rule(sites="*", format="bf16")))
    export = fsdp2_policies(model, rules)
    for path, mixed in export.policies.items():
        fully_shard(model.get_submodule(path), mp_policy=mixed)
    seen: dict[str, torch.dtype] = {}
    for name in ("enter", "blocks.1.rise", "head"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, args, y, name=name: seen.update({name: y.dtype}))
    output = model(batch_of(0))
    output.square().mean().backward()
    return seen, output.dtype, {p.grad.dtype for p in model.parameters() if p.grad is not None}


def test_an_exported_policy_shards_in_the_formats_of_the_policy(ranks: TwoRanks) -> None:
    low, high = torch.bfloat16, torch.float32
    for seen, output, gradients in ranks.run(fsdp_exported):
        assert seen == {"enter": low, "blocks.1.rise": low, "head": high}
        assert (output, gradients) == (high, {high})


class Tied(nn.Module):
    """Reads the weight of a child that never runs, and one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        y: torch.Tensor = self.last(self.between(self.first(x)).float())  # by hand, as the export says
        return y


def tied_batch() -> torch.Tensor:
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def fsdp_by_file(rank: int, text: str) -> Any:
    """Shard as a written module says; return dtypes of outputs, and the gradients of a step, whole."""
    torch.manual_seed(0)
    model, seen = Tied(), {}
    made: dict[str, Any] = {}
    exec(text, made)
    assert made["shard"](model, reshard_after_forward=True) is model
    for name in ("attention", "between", "last"):
        hook = lambda _, args, y, name=name: seen.update({name: (y[0] if isinstance(y, tuple) else y).dtype})  # noqa: E731
        model.get_submodule(name).register_forward_hook(hook)
    model(tied_batch()).square().mean().backward()
    return seen, {name: value for name, value in state_of(model).items() if name.endswith(".grad")}


def test_a_written_module_shards_what_belongs_together_as_one(ranks: TwoRanks) -> None:
    from autoprec.capture import record
    from autoprec.graph.uses import uses_of
    from autoprec.runtime.export import fsdp2_policies
    from autoprec.runtime.export_module import Origin, fsdp2_module

    workload = autoprec.Workload(
        model=Tied, batches=lambda: [tied_batch()], loss=lambda model, x: model(x).square().mean()
    )
    recording = record(workload)
    rules = (("attention.out_proj", "fp16"), ("between", "bf16"), ("*", "fp32"))
    policy = Policy(name="e", rules=tuple(Rule(sites=sites, format=name) for sites, name in rules))
    export = fsdp2_policies(recording.model, policy, uses_of(recording.op_graph))
    text = fsdp2_module(export, Origin(policy="e", file="e.yaml", workload="net.py", graph="0"))
    torch.manual_seed(0)
    alone = Tied()
    low = {name: value.bfloat16() for name, value in alone.between.named_parameters()}
    alone.between.forward = lambda x: torch.func.functional_call(nn.Linear(8, 8), low, (x.bfloat16(),))  # type: ignore[method-assign]
    alone(tied_batch()).square().mean().backward()
    wanted = {name: value for name, value in state_of(alone).items() if name.endswith(".grad")}
    for seen, gradients in ranks.run(fsdp_by_file, text):
        assert seen == {"attention": torch.float32, "between": torch.bfloat16, "last": torch.float32}
        assert differing(gradients, wanted) == []


def fsdp_scaled(rank: int) -> Any:
    """Overflow on rank 1 in the second of four steps, under FSDP."""
    torch.manual_seed(0)
    model = Net()
    scale = LossScale(kind="dynamic", initial=1024.0, growth_interval=2)
    precision = autoprec.apply(model, Policy(name="scaled", rules=(Rule(sites="*", format="fp16"),), loss_scale=scale))
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, states = [], []
    for step in range(4):
        optimizer.zero_grad()
        x = batch_of(step)
        if (rank, step) == (1, 1):
            x = x * 1e4
        precision.scaler.scale(loss_of(model, precision, x)).backward()
        precision.scaler.step(optimizer)
        precision.scaler.update()
        scales.append(precision.scaler.get_scale())
        states.append({name: full(value).detach().clone() for name, value in model.named_parameters()})
    return scales, states


def test_fsdp_skips_a_step_on_all_ranks_alike(ranks: TwoRanks) -> None:
    (scales, states), (other_scales, other_states) = ranks.run(fsdp_scaled)
    assert scales == other_scales == [1024.0, 512.0, 512.0, 1024.0]
    assert all(differing(a, b) == [] for a, b in zip(states, other_states, strict=True))
    assert differing(states[0], states[1]) == []
    assert differing(states[1], states[2]) != []


def fsdp_alive(rank: int, order: str) -> list[int]:
    """Count, when the last module has run, the low-precision tensors as large as a weight of a block."""
    torch.manual_seed(0)
    model = Net()
    if order == "after":
        shard(model)
    precision = autoprec.apply(model, MIXED)
    if order == "before":
        shard(model)
    counts: list[int] = []
    size = 8 * 16
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}  # of earlier tests in this rank
    canary = torch.zeros(size, dtype=torch.bfloat16)  # is counted, so the count works

    def count(*_: Any) -> None:
        low = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16]
        counts.append(sum(id(t) not in before and t.untyped_storage().nbytes() == 2 * size for t in low))

    model.head.register_forward_hook(count)
    with torch.no_grad(), precision.loss():
        model(batch_of(0))
        model(batch_of(0))
    del canary
    return counts


@pytest.mark.parametrize("order", ["before", "after"])
def test_no_cast_of_a_resharded_weight_stays_alive(ranks: TwoRanks, order: str) -> None:
    assert ranks.run(fsdp_alive, order) == [[1, 1]] * 2


# Collectives


class Collective(nn.Module):
    """Gathers, reduces and scatters inside its forward, as batch statistics and losses over all ranks do."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        from torch.distributed import _functional_collectives as functional

        total, gathered, part = x.clone(), [torch.zeros_like(x) for _ in range(2)], torch.zeros_like(x)
        dist.all_reduce(total)
        dist.all_gather(gathered, x)
        dist.scatter(part, gathered if dist.get_rank() == 0 else None, 0)
        dist.broadcast(x, 1)
        summed = functional.all_reduce(x, "sum", dist.group.WORLD)
        return {"total": total, "gathered": gathered[1], "part": part, "x": x, "summed": summed + 0.0}


def collectives(rank: int, *, low: bool) -> Any:
    rules = (Rule(sites=":add", format="fp32"), Rule(sites="*", format="bf16" if low else "fp32"))
    model = Collective()
    precision = autoprec.apply(model, Policy(name="c", rules=rules, outputs="computed"))
    with torch.no_grad(), precision.loss():
        results: dict[str, torch.Tensor] = model(torch.full((3,), 1.001 + rank))
    return results


def collectives_low(rank: int) -> Any:
    return collectives(rank, low=True)


def collectives_fp32(rank: int) -> Any:
    return collectives(rank, low=False)


def test_collectives_are_not_cast(ranks: TwoRanks) -> None:
    for ours, theirs in zip(ranks.run(collectives_low), ranks.run(collectives_fp32), strict=True):
        assert differing(ours, theirs) == []
        assert {value.dtype for value in ours.values()} == {torch.float32}
