"""`Precision.exchange`: another policy in place, and all that training has made of the run goes on."""

import pytest
import torch

import autoprec
from autoprec.errors import ApplyError
from autoprec.policy import LossScale, Parameters, Policy, Rule
from tests.faults.guarded import batch_at, loss_of, net, policy_of


def test_sites_change_and_everything_else_stays():
    model = net()
    precision = autoprec.apply(model, policy_of("bf16", low="*", parameters=Parameters(storage="bf16", master="fp32")))
    before = dict(model.named_parameters())
    masters = {name: each.clone() for name, each in precision.storage.masters().items()}
    scaler = precision.scaler
    mixed = policy_of("bf16", low="0:linear", parameters=Parameters(storage="bf16", master="fp32"))
    precision.exchange(mixed)
    assert precision.policy is mixed
    assert precision.scaler is scaler
    assert all(before[name] is each for name, each in model.named_parameters())
    assert all(torch.equal(masters[name], each) for name, each in precision.storage.masters().items())
    asked = {str(row.site): row.asked for row in precision.trace(batch_at(0), loss_of).rows}
    assert (asked["0:linear#0"], asked["3:linear#0"]) == ("bf16", "fp32")
    precision.remove()
    assert all(torch.equal(masters[name], each) for name, each in model.named_parameters())


def test_a_policy_of_fp32_casts_nothing_before_and_after_one_that_does():
    model = net()
    precision = autoprec.apply(model, policy_of("fp32"))
    assert not any("forward" in module.__dict__ for module in model.modules())
    precision.exchange(policy_of("bf16", low="*"))
    with precision.loss():
        assert (torch.ones(1) * 2).dtype == torch.bfloat16
        assert model[0](torch.ones(1, model[0].in_features)).dtype == torch.bfloat16
    precision.exchange(policy_of("fp32"))
    with precision.loss():
        assert (torch.ones(1) * 2).dtype == torch.float32
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_scale_goes_on_within_the_new_bounds():
    precision = autoprec.apply(net(), policy_of("fp16", scale=LossScale(kind="dynamic", initial=1024.0)))
    precision.exchange(policy_of("fp16", scale=LossScale(kind="dynamic", initial=64.0, maximum=256.0)))
    assert precision.scaler.get_scale() == 256.0
    precision.exchange(policy_of("bf16"))
    assert not precision.scaler.is_enabled()


def test_a_policy_that_cannot_be_installed_leaves_the_old_one_running():
    model = net()
    old = policy_of("fp16", low="*", scale=LossScale(kind="dynamic", initial=128.0))
    precision = autoprec.apply(model, old)
    scaler = precision.scaler
    wrong = Policy(
        name="wrong", rules=(Rule(sites="*", format="bf16"),), parameters=Parameters(storage="bf16", keep=("nowhere",))
    )
    with pytest.raises(ApplyError, match=r'"nowhere" of parameters.keep matches no parameter'):
        precision.exchange(wrong)
    assert precision.policy is old
    assert precision.scaler is scaler
    assert precision.is_installed
    assert {row.asked for row in precision.trace(batch_at(0), loss_of).rows} == {"fp16"}


def test_after_remove_there_is_nothing_to_exchange():
    precision = autoprec.apply(net(), policy_of("bf16"))
    precision.remove()
    with pytest.raises(ApplyError, match='exchange: policy "bf16" is not installed any more; apply it again first'):
        precision.exchange(policy_of("bf16"))
