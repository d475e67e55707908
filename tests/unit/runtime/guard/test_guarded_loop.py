"""A guarded loop: the step it takes is that of `precision.step`, and what it finds is told and reacted to."""

import copy
import json
import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import autoprec
from autoprec.errors import GuardError, OutputError
from autoprec.policy import LossScale, Parameters
from autoprec.runtime.overflow import Overflow
from tests.faults.guarded import BAND, Loop, batch_at, loss_of, net, policy_of

SCALED = LossScale(kind="dynamic", initial=256.0, growth_interval=7)
POLICIES = {
    "bf16": policy_of("bf16"),
    "fp16-scaled": policy_of("fp16", scale=SCALED),
    "masters": policy_of("bf16", low="*", parameters=Parameters(storage="bf16", master="fp32")),
    "stochastic": policy_of("bf16", low="*", parameters=Parameters(storage="bf16", rounding="stochastic")),
}


def weights(loop: Loop) -> list[torch.Tensor]:
    return [each.detach().clone() for each in loop.model.parameters()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_healthy_run_is_the_unguarded_one_bit_for_bit(name, max_norm):
    loop = Loop(POLICIES[name]).train(12, max_norm=max_norm)
    model = net()
    precision = autoprec.apply(model, POLICIES[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(12):
        optimizer.zero_grad()
        batch = batch_at(step)
        with precision.loss():
            loss = loss_of(model, batch)
        precision.backward(loss)
        outcome = precision.step(optimizer, max_norm=max_norm)
    assert equal(weights(loop), [each.detach() for each in model.parameters()])
    assert loop.findings == []
    last = loop.outcomes[-1]
    assert (last.step, last.stepped, last.loss_scale) == (12, True, outcome.loss_scale)
    assert last.grad_norm is None if max_norm is None else torch.equal(last.grad_norm, outcome.grad_norm)
    assert not last.collapsed


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_is_not_finite_changes_nothing_and_no_scheduler(where, scaled, fused):
    policy = policy_of("fp16", scale=SCALED) if scaled else policy_of("bf16")
    loop = Loop(policy, kind=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=fused)).train(3)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1)
    before, state = weights(loop), copy.deepcopy(loop.optimizer.state_dict()["state"])
    if where == "loss":
        loop.loss_of = lambda model, batch: loss_of(model, batch) + torch.inf
    else:
        next(loop.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # there was none
        outcome = loop.step(batch_at(3), scheduler=scheduler)
    assert not outcome.stepped
    assert equal(before, weights(loop))
    assert scheduler.last_epoch == 0
    after = loop.optimizer.state_dict()["state"]
    assert all(torch.equal(state[key]["exp_avg"], after[key]["exp_avg"]) for key in state)
    assert "found_inf" not in vars(loop.optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_is_not_finite_counts_where_gradients_are_scaled_and_clipped(fused):
    policy = policy_of("fp16", scale=SCALED)
    loop = Loop(policy, kind=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=fused)).train(3)
    before = weights(loop)
    loop.loss_of = lambda model, batch: loss_of(model, batch) + torch.inf
    assert not loop.step(batch_at(3), max_norm=1.0).stepped
    assert equal(before, weights(loop))


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_beyond_the_limit_are_not_stepped_on_scaled_or_not(scaled, max_norm):
    loop = Loop(policy_of("fp32", scale=SCALED if scaled else None)).train(2)
    before = weights(loop)
    loop.loss_of = lambda model, batch: loss_of(model, batch) * 2.0**61  # norms of some 2**61, and finite in FP32
    assert not loop.step(batch_at(2), max_norm=max_norm).stepped
    assert equal(before, weights(loop))
    loop.loss_of = lambda model, batch: loss_of(model, batch) * 2.0**52
    assert loop.step(batch_at(3), max_norm=max_norm).stepped


def test_gradients_whose_norm_fp32_cannot_hold_are_not_stepped_on():
    loop = Loop(policy_of("bf16")).train(2)
    before = weights(loop)
    loop.loss_of = lambda model, batch: loss_of(model, batch) * 1e25
    assert not loop.step(batch_at(2)).stepped
    assert equal(before, weights(loop))


def test_clipped_or_not_and_with_micro_batches_steps_are_checked():
    loop = Loop(policy_of("bf16")).train(2)
    loop.optimizer.zero_grad()
    for micro in range(3):
        x, y = batch_at(micro)
        loss = loss_of(loop.model, (x * (torch.nan if micro == 1 else 1), y))
        loop.precision.backward(loss)
    before = weights(loop)
    assert not loop.guard.step(loss, max_norm=1.0).stepped  # the last loss is finite, the sum of gradients is not
    assert equal(before, weights(loop))
    assert [event.detector for event in loop.events if event.reaction == "warn"] == ["non_finite_gradient"]


def test_several_optimizers_step_together_or_by_turns():
    model = net()
    precision = autoprec.apply(model, policy_of("bf16"))
    one, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3]))
    guard = autoprec.guard(model, [one, other], precision)
    before = [each.detach().clone() for each in model.parameters()]
    loss_of(model, batch_at(0)).backward()
    guard.step(torch.ones(()), optimizers=[other])
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[3].weight, before[4])
    guard.step(torch.ones(()))
    assert not torch.equal(model[0].weight, before[0])
    with pytest.raises(
        GuardError, match=r"this SGD is none of the optimizers of this guard; give it to autoprec.guard"
    ):
        guard.step(torch.ones(()), optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])


@pytest.mark.parametrize(("loss", "what"), [(3.0, "a float"), (torch.ones(2), r"a tensor of shape \(2,\)")])
def test_a_loss_that_is_none_is_refused(loss, what):
    with pytest.raises(GuardError, match=f"guard.step: the loss is {what}; give the scalar tensor"):
        Loop(policy_of("bf16")).guard.step(loss)


def test_the_overflowing_site_is_promoted_and_all_else_goes_on():
    loop = Loop(policy_of("fp16", low="*", scale=SCALED)).train(6)
    scaler, optimizer_state = loop.precision.scaler, loop.optimizer.state
    for step in range(6, 9):
        loop.step((batch_at(step)[0] * 1e6, batch_at(step)[1]))
    event = loop.events[-1]
    assert (event.detector, event.reaction, event.site) == ("non_finite_loss", "promote", "0:linear")
    assert "0:linear is in fp32 from here on" in event.message
    assert loop.guard.policy.rules[0].sites == "0:linear"
    assert loop.guard.policy.rules[0].why == "guard, step 9: non_finite_loss"
    assert loop.guard.policy is loop.precision.policy
    assert loop.precision.scaler is scaler
    assert loop.optimizer.state is optimizer_state
    rows = {str(row.site): row.asked for row in loop.precision.trace(batch_at(0), loss_of).rows}
    assert rows["0:linear#0"] == "fp32"
    assert rows["3:linear#0"] == "fp16"
    assert loop.step((batch_at(9)[0] * 1e4, batch_at(9)[1])).stepped


def test_without_a_batch_the_layer_is_found_in_the_gradients():
    loop = Loop(policy_of("fp16", low="*")).train(2)
    loop.model[0].weight.register_hook(lambda gradient: gradient * torch.inf)
    for step in range(2, 5):
        loop.optimizer.zero_grad()
        loss = loss_of(loop.model, batch_at(step))
        loop.precision.backward(loss)
        loop.guard.step(loss)
    assert (loop.events[-1].reaction, loop.events[-1].site) == ("promote", "0")


def test_a_fallback_goes_on_from_the_masters():
    loop = Loop(POLICIES["masters"]).train(4)
    masters = {name: master.clone() for name, master in loop.precision.storage.masters().items()}
    kept = dict(loop.model.named_parameters())
    loop.guard._run.fall_back()
    now = dict(loop.model.named_parameters())
    assert all(now[name] is kept[name] and torch.equal(now[name], master) for name, master in masters.items())
    loop.train(3)
    assert loop.is_finite
    assert loop.model[0].weight.dtype == torch.float32


def test_falling_back_widens_low_optimizer_state():
    loop = Loop(policy_of("bf16", low="*", parameters=Parameters(storage="bf16")), lr=1e-1).train(2)
    assert loop.optimizer.state[loop.model[0].weight]["exp_avg"].dtype == torch.bfloat16
    loop.guard._run.fall_back()
    assert loop.optimizer.state[loop.model[0].weight]["exp_avg"].dtype == torch.float32
    loop.train(2)


def broken(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[3].bias.fill_(torch.nan)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", POLICIES)
def test_restoring_gives_the_good_state_exactly(name, where, tmp_path):
    loop = Loop(POLICIES[name], snapshot_every=5, snapshots="memory" if where == "memory" else tmp_path / "good")
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=2)
    loop.train(5, scheduler=scheduler)
    good, masters = weights(loop), loop.precision.state_dict()["masters"]
    masters = {key: value.clone() for key, value in masters.items()}
    scale, random = loop.precision.scaler.get_scale(), torch.get_rng_state()
    loop.train(3, scheduler=scheduler)
    torch.rand(1)
    broken(loop)
    outcome = loop.step(batch_at(8), scheduler=scheduler)  # skipped, as the loss is not finite
    outcome = loop.step(batch_at(9), scheduler=scheduler)  # and at the sample the weights are found
    assert outcome.restored_to == 5
    event = outcome.events[-1]
    assert (event.detector, event.reaction, event.site) == ("non_finite_weights", "restore", "3.bias")
    assert "went back 5 steps, to the good state of step 5" in event.message
    assert "batches go on, they are not rewound" in event.message
    assert equal(good, weights(loop))
    now = loop.precision.storage.masters()
    assert now.keys() == masters.keys()
    assert all(torch.equal(now[key], masters[key]) for key in masters)
    assert loop.precision.scaler.get_scale() == scale
    assert torch.equal(torch.get_rng_state(), random)
    assert (loop.guard.position, loop.guard.num_steps, scheduler.last_epoch) == (5, 10, 5)
    loop.train(5)
    assert loop.is_finite


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_8_bit_state_of_torchao_is_kept_and_restored(where, tmp_path):
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps, for a minute
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
        with autoprec.apply(model, policy_of("bf16", parameters=Parameters(optimizer_state="8bit"))) as precision:
            optimizer = precision.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            folder = "memory" if where == "memory" else tmp_path / "good"
            guard = autoprec.guard(model, optimizer, precision, snapshots=folder, every=1, snapshot_every=2)
            for step in range(5):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 64)).square().mean()
                loss.backward()
                if step == 4:
                    with torch.no_grad():
                        model[0].bias[0] = torch.inf
                outcome = guard.step(torch.ones(()))
                if step == 3:
                    kept = optimizer.state[model[0].weight]["exp_avg"].dequantize()
            assert outcome.restored_to == 4
            assert torch.equal(optimizer.state[model[0].weight]["exp_avg"].dequantize(), kept)
    finally:
        torch.compiler.set_stance("default")


def test_without_snapshots_and_fallback_the_run_is_stopped():
    loop = Loop(policy_of("bf16"), snapshot_every=None).train(3)
    broken(loop)
    loop.step(batch_at(3))
    with pytest.raises(GuardError, match=r"the guard stopped the run: step 5: non_finite_weights at 3.bias .*stop"):
        loop.step(batch_at(4))
    assert loop.events[-1].reaction == "stop"


def test_only_allowed_reactions_are_taken():
    loop = Loop(policy_of("fp16"), reactions=["warn"]).train(2)
    for step in range(2, 14):
        loop.step((batch_at(step)[0] * 1e6, batch_at(step)[1]))
    assert {reaction for _, reaction in loop.findings} == {"warn"}


def test_an_unguardable_overflow_of_a_compiled_model_falls_to_the_gradients():
    loop = Loop(policy_of("fp16", low="*"))
    compiled = torch.compile(loop.model, backend="eager")
    loop.loss_of = lambda model, batch: loss_of(compiled if model is loop.model else model, batch)
    loop.train(2)
    for step in range(2, 5):
        loop.step((batch_at(step)[0] * 1e6, batch_at(step)[1]))
    assert loop.findings[-1] == ("non_finite_loss", "promote")
    assert loop.events[-1].site == "0:linear"
    outcome = loop.step((batch_at(5)[0] * 1e4, batch_at(5)[1]))  # compiled anew, with the promoted site
    assert outcome.stepped
    rule = loop.guard.policy.rules[0]
    assert (rule.sites, rule.format) == ("0:linear", "fp32")


@pytest.mark.parametrize("name", POLICIES)
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    policy = POLICIES[name]
    whole, half = Loop(policy).train(14), Loop(policy).train(7)
    file = tmp_path / "run.pt"
    parts = {"model": half.model, "optimizer": half.optimizer, "guard": half.guard, "precision": half.precision}
    torch.save({key: part.state_dict() for key, part in parts.items()}, file)
    saved = torch.load(file, weights_only=True)
    again = Loop(policy)
    again.losses = list(half.losses)
    parts = {"model": again.model, "optimizer": again.optimizer, "guard": again.guard, "precision": again.precision}
    for key, part in parts.items():
        part.load_state_dict(saved[key])
    again.train(7)
    assert equal(weights(whole), weights(again))
    assert whole.guard.state_dict() == again.guard.state_dict()
    assert again.events == []  # what rests was said before the checkpoint


def test_a_promoted_policy_survives_the_checkpoint():
    loop = Loop(policy_of("fp16", low="*", scale=SCALED)).train(2)
    for step in range(2, 5):
        loop.step((batch_at(step)[0] * 1e6, batch_at(step)[1]))
    again = Loop(policy_of("fp16", low="*", scale=SCALED))
    for part in ("model", "optimizer", "guard", "precision"):
        getattr(again, part).load_state_dict(copy.deepcopy(getattr(loop, part).state_dict()))
    assert again.guard.policy == loop.guard.policy
    again.step(batch_at(6))
    loop.step(batch_at(6))
    assert equal(weights(again), weights(loop))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, "this is not what Guard.state_dict"),
        (lambda state: {**state, "schema": 99}, "the state has schema 99 and this autoprec reads 1"),
        (lambda state: {**state, "policy_hash": "0"}, r'a run that began under another policy \(0\) than "bf16"'),
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change, message):
    loop = Loop(policy_of("bf16")).train(3)
    before = loop.guard.state_dict()
    with pytest.raises(GuardError, match=message):
        loop.guard.load_state_dict(change(before))
    assert loop.guard.state_dict() == before


def test_detectors_without_calibration_rest_and_say_so_once():
    loop = Loop(policy_of("bf16")).train(12)
    said = [event for event in loop.events if event.reaction == "info"]
    assert [event.step for event in said] == [1]
    assert 'policy "bf16" has no calibration; these rest: flush, overflow, loss_drift' in said[0].message
    loop = Loop(policy_of("bf16", calibration={"losses": BAND})).train(2)
    assert loop.events == []  # it has no layer in a narrow format: there is nothing to rest
    loop = Loop(policy_of("fp16", calibration={"losses": BAND})).train(1)
    assert "is not calibrated for flush_frac, layer_flush_frac; these rest: flush, overflow" in loop.events[0].message


def test_events_go_everywhere(tmp_path, caplog):
    class Board:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []
            self.texts: list[tuple[str, str, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.scalars.append((tag, scalar_value, global_step))

        def add_text(self, tag: str, text_string: str, global_step: int) -> None:
            self.texts.append((tag, text_string, global_step))

    board, file = Board(), tmp_path / "events.jsonl"
    with caplog.at_level(logging.INFO, logger="autoprec.guard"):
        loop = Loop(policy_of("bf16"), events=file, tensorboard=board).train(5)
        x, y = batch_at(5)
        loop.step((x * torch.nan, y))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["detector"] for line in lines] == ["guard", "non_finite_loss"]
    assert {key: lines[1][key] for key in ("schema", "step", "number", "threshold", "reaction", "rank")} == {
        "schema": 1, "step": 6, "number": "nan", "threshold": 3, "reaction": "warn", "rank": 0,
    }  # fmt: skip
    assert lines[1]["advice"]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert ("guard/loss", 5) in [(tag, step) for tag, _, step in board.scalars]
    assert board.texts[-1] == ("guard/events", str(loop.events[-1]), 6)


def test_what_a_receiver_raises_is_the_users_own():
    loop = Loop(policy_of("bf16")).train(1)

    def refuse(event: autoprec.GuardEvent) -> None:
        raise KeyError(event.detector)

    loop.guard._responder._sinks._on_event = refuse
    with pytest.raises(KeyError, match="non_finite_loss"):
        loop.step((batch_at(0)[0] * torch.nan, batch_at(0)[1]))


def test_a_file_that_cannot_be_written_any_more_ends_no_run(tmp_path, caplog):
    folder = tmp_path / "there"
    folder.mkdir()
    loop = Loop(policy_of("bf16"), events=folder / "events.jsonl").train(1)
    (folder / "events.jsonl").unlink()
    folder.rmdir()
    loop.step((batch_at(0)[0] * torch.nan, batch_at(0)[1]))
    loop.step((batch_at(0)[0] * torch.nan, batch_at(0)[1]))
    assert sum("events are written to" in record.message for record in caplog.records) == 1


def bad_arguments() -> dict[str, tuple[dict[str, object], str]]:
    return {
        "every": ({"every": 0}, "every is 0; allowed: whole numbers from 1"),
        "snapshot_every": ({"snapshot_every": -1}, "snapshot_every is -1; allowed: .* or None for no snapshots"),
        "reactions": ({"reactions": ["explode"]}, "reactions are .*explode.*; allowed: a list of warn, promote"),
        "reactions-text": ({"reactions": "warn"}, "reactions are 'warn'; allowed"),
        "on_event": ({"on_event": 3}, "on_event is 3; allowed: a function that takes an autoprec.GuardEvent"),
        "tensorboard": ({"tensorboard": "runs"}, "tensorboard is 'runs'; allowed: an object with add_scalar"),
        "group": ({"group": "world"}, "group is 'world'; allowed: a process group, None"),
    }


@pytest.mark.parametrize("name", bad_arguments())
def test_a_wrong_argument_is_named(name):
    arguments, message = bad_arguments()[name]
    model = net()
    precision = autoprec.apply(model, policy_of("bf16"))
    with pytest.raises(GuardError, match=message):
        autoprec.guard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **arguments)


def test_wrong_parts_are_named(tmp_path):
    model = net()
    precision = autoprec.apply(model, policy_of("bf16"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GuardError, match=r"precision is a str; give it what autoprec.apply\(model, policy\) returned"):
        autoprec.guard(model, optimizer, "fp32")
    with pytest.raises(GuardError, match=r"the model is a Linear that does not hold the one the policy was applied to"):
        autoprec.guard(nn.Linear(2, 2), optimizer, precision)
    with pytest.raises(GuardError, match="an int is no optimizer"):
        autoprec.guard(model, [3], precision)
    with pytest.raises(GuardError, match="no optimizer was given"):
        autoprec.guard(model, [], precision)
    with pytest.raises(GuardError, match=r"SGD holds no parameter of the model; build it on model.parameters\(\)"):
        autoprec.guard(model, torch.optim.SGD(net().parameters(), lr=0.1), precision)
    with pytest.raises(OutputError, match=r"events cannot be written to .*name another file"):
        autoprec.guard(model, optimizer, precision, events=tmp_path / "missing" / "events.jsonl")
    (tmp_path / "taken").write_text("")
    with pytest.raises(OutputError, match=r"snapshots cannot be kept in .*taken.*name another folder"):
        autoprec.guard(model, optimizer, precision, snapshots=tmp_path / "taken")
    precision.remove()
    with pytest.raises(GuardError, match='policy "bf16" is not installed any more; apply it again first'):
        autoprec.guard(model, optimizer, precision)


def test_a_place_that_settles_more_counts_more():
    from autoprec.runtime.guard.reactions import Place, _place, surest

    layer, data, site = Place(kind="layer", name="0"), Place(kind="data"), Place(kind="site", name="0:linear")
    assert surest([layer, site, data]) is data
    assert surest([Place(kind="unknown"), layer, site]) is site
    found = Overflow(
        where="backward", place="between sites", site=None, kernel="mul", format="fp16", largest=1.0, loss_scale=1.0,
        advice="",
    )  # fmt: skip
    assert _place(found).kind == "unknown"


def test_import_needs_torch_and_yaml_only():
    source = "\n".join(path.read_text() for path in (Path(autoprec.__file__).parent / "runtime" / "guard").glob("*.py"))
    assert "import tensorboard" not in source
    assert "import numpy" not in source
