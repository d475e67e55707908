"""What somebody new does wrong is answered with what to do, before anything is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.errors import ApplyError, AutoprecError, PolicyFileError, ScalingError, TraceError
from autoprec.policy import LossScale, Parameters, Policy, Rule
from autoprec.runtime import apply

X, Y = torch.ones(2, 4), torch.zeros(2, 4)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    given = tuple(Rule(sites=sites, format=name) for sites, name in (*rules, ("*", "bf16")))
    return Policy(name="test", rules=given, **settings)


@pytest.mark.parametrize(
    ("model", "given", "error", "message"),
    [
        (
            net,
            "autocast-bf61",
            PolicyFileError,
            r"^autocast-bf61: there is no such policy file, and no such preset for ",
        ),
        (net, "autocast-bf61", PolicyFileError, r"presets: fp32, .*bf16-master"),
        (net, None, ApplyError, "^apply: the policy is None; allowed: a policy file, the name of a preset, or an auto"),
        (net, {"rules": []}, ApplyError, r"^apply: the policy is \{'rules': \[\]\}; allowed"),
        (lambda: "fp32", net(), ApplyError, r"^apply: the model is a str; write apply\(model, policy\) with a torch"),
        (net, policy(("encoder:linear", "fp32")), ApplyError, r'its modules: "0", "1", "2"; mend the rule'),
        (net, policy(("linear", "fp32")), ApplyError, r'; to name the op write "\*:linear"; mend the rule'),
    ],
)
def test_apply(model: Callable[[], Any], given: Any, error: type[AutoprecError], message: str) -> None:
    with pytest.raises(error, match=message):
        apply(model(), given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda _: ((), {}), r"^precision\.step: no optimizer was given; write precision\.step\(optimizer\)$"),
        (lambda o: ((o, 1.0), {}), r"float is no optimizer; write .* and the rest by name: max_norm=1\.0"),
        (lambda o: (([o],), {}), "list is no optimizer"),
        (lambda o: ((o, o), {}), r"one of the 2 optimizers is given twice; give each once"),
        (lambda o: ((o,), {"max_norm": -1.0}), r"max_norm is -1\.0; allowed: numbers above 0; leave it out"),
        (lambda o: ((o,), {"max_norm": float("nan")}), "max_norm is nan; allowed"),
        (
            lambda o: ((o,), {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o)}),
            r"ReduceLROnPlateau steps on a metric, .* call scheduler\.step\(metric\)",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["none", "dynamic"])
def test_step(arguments: Callable[[Any], Any], message: str, kind: Any) -> None:
    model = net()
    precision = apply(model, policy(loss_scale=LossScale(kind=kind)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.backward(model(X).sum())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    positional, named = arguments(optimizer)
    with pytest.raises(ScalingError, match=message):
        precision.step(*positional, **named)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert precision.step(optimizer).stepped


def test_an_optimizer_that_holds_its_state_in_fp32_under_a_policy_of_8_bit() -> None:
    model = net()
    precision = apply(model, policy(parameters=Parameters(optimizer_state="8bit")))
    precision.backward(model(X).sum())
    message = r'policy "test" holds optimizer state in 8bit, and this AdamW holds it in FP32; write optimizer = prec'
    with pytest.raises(ApplyError, match=message):
        precision.step(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("state", [None, {}, {"0.weight": torch.ones(1)}])
def test_a_checkpoint_that_is_none(state: Any) -> None:
    with pytest.raises(ApplyError, match=r"this is not what Precision\.state_dict\(\) returned"):
        apply(net(), policy()).load_state_dict(state)


def test_loss_code_after_remove_is_not_cast() -> None:
    precision = apply(net(), policy())
    with precision.loss():
        assert (X @ X.T).dtype == torch.bfloat16
    precision.remove()
    with precision.loss():
        assert (X @ X.T).dtype == torch.float32


@pytest.mark.parametrize("batch", [(X, Y), {"input_ids": X}])
def test_a_batch_that_is_more_than_the_model_takes(batch: Any) -> None:
    precision = apply(net(), policy())
    with pytest.raises(TraceError, match=r"Sequential\.forward\(input\) cannot be called with the batch alone .*loss="):
        precision.trace(batch)
    assert precision.trace((X, Y), lambda model, batch: F.mse_loss(model(batch[0]), batch[1])).rows


def test_a_trace_inside_loss_code_would_see_nothing() -> None:
    precision = apply(net(), policy())
    with precision.loss(), pytest.raises(TraceError, match=r"trace: called inside `with precision\.loss\(\)`"):
        precision.trace(X)


@pytest.mark.filterwarnings("ignore")  # torch's own on process groups
@pytest.mark.parametrize(
    "settings", [{"storage": "bf16"}, {"storage": "bf16", "master": "fp32", "gradients": "storage"}]
)
def test_parameters_that_ddp_holds_are_not_stored_low(settings: dict[str, Any], tmp_path: Path) -> None:
    """DDP would go on with the FP32 ones: gradients were averaged no more, and replicas drifted apart in silence."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        low = policy(parameters=Parameters(**settings))
        wrapped = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(ApplyError, match=r"is in DistributedDataParallel already.*apply the policy first"):
            apply(wrapped.module, low)
        assert wrapped.module(X).dtype == torch.float32
        apply(wrapped.module, policy()).remove()  # nothing is stored otherwise, so either order will do
        apply(net(), low).remove()  # another model
    finally:
        torch.distributed.destroy_process_group()
