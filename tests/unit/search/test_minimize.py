"""The minimal result, on injected proofs, timings and predictions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.analysis import static_marks
from autoprec.capture import record
from autoprec.graph.layers import layers_of
from autoprec.graph.site import Site
from autoprec.policy import Policy, preset, resolve
from autoprec.records.run import Interval, MemoryRecord, VerificationRecord
from autoprec.search.choices import FP32, LOW, Value, defaults, targets_of
from autoprec.search.choose import Outcome
from autoprec.search.layout import layout_of, lowerable_sites
from autoprec.search.minimize import Bench, Minimal, minimized
from autoprec.search.prices import Prices, priced
from autoprec.search.prove import Prover
from autoprec.search.space import Space
from autoprec.search.trials import Catalog
from tests.unit.records.samples import MEMORY, trial
from tests.unit.search import mlp
from tests.unit.search.blocks import SITES, layout, mark, rows, site
from tests.unit.search.test_objective import protocol

SOFTMAX, NORM = "*:softmax", "*:layer_norm"
HEAD = (site("head:linear#0"), site("head:conv2d#0"))
CATALOG = Catalog(baselines={"fp32": preset("fp32", "cpu")}, layout=layout(), device={"kind": "cpu", "name": "Testium"})
SURE, TIE, SLOWER = (Interval(value=v, low=v - 0.005, high=v + 0.005) for v in (1.1, 1.0, 0.9))


@dataclass
class FakeModel:
    """A step that takes 1 s in FP32, and at each site what `saves` says less if it is low."""

    saves: Mapping[Site, float] = field(default_factory=dict)
    op_times: Any = field(default_factory=lambda: SimpleNamespace(formats=("bf16", "fp16")))

    def predict(self, formats: Mapping[Site, str], outputs: str) -> Any:
        assert outputs == "fp32"
        return SimpleNamespace(step_s=1 - sum(s for each, s in self.saves.items() if formats[each] != "fp32"))


@dataclass
class Trainer:
    """Refuses policies in which a site of `needed` runs low; counts what it was asked; has time for `time` proofs."""

    needed: Callable[[Site], bool] = lambda _: False
    versus_of: Callable[[Policy, Policy], Interval] = lambda _, bar: SURE if bar.name == "fp32" else TIE
    time: int = 1000
    proved: list[Policy] = field(default_factory=list)
    timed: list[tuple[Policy, Policy]] = field(default_factory=list)

    def prove(self, name: str, policy: Policy) -> VerificationRecord:
        self.proved.append(policy)
        low = low_sites(policy)
        bad = [each for each in low if self.needed(each)]
        return VerificationRecord(name=name, passed=not bad, reason="5 % lost" if bad else "ok", seed=1, horizon=80)

    def versus(self, ours: Policy, bar: Policy) -> Interval:
        self.timed.append((ours, bar))
        return self.versus_of(ours, bar)

    def memory(self, policy: Policy) -> MemoryRecord:
        return replace(MEMORY, total_bytes=len(low_sites(policy)))

    @property
    def bench(self) -> Bench:
        return Bench(
            prove=self.prove, versus=self.versus, has_time=lambda: len(self.proved) < self.time, memory=self.memory
        )


def low_sites(policy: Policy) -> set[Site]:
    return {each for each, fmt in resolve(policy, SITES).formats.items() if fmt != "fp32"}


def winner(**changes: Value) -> Outcome:
    choice = defaults(rows(), "bf16") | {key.replace("__", ":"): value for key, value in changes.items()}
    won = replace(trial("won", 1.2, number=3), choice=choice)
    fp32 = trial("fp32", 1.0, kind="baseline")
    return Outcome(
        trial=won, best=replace(fp32, choice={}), verdict="improved", versus=Interval(value=1.2, low=1.1, high=1.3),
        verified=True,
    )  # fmt: skip


def minimal(outcome: Outcome, trainer: Trainer, model: FakeModel | None = None, catalog: Catalog = CATALOG) -> Minimal:
    found = minimized(outcome, catalog, trainer.bench, Prices(model=model))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_what_is_not_needed_is_taken_out_in_one_trial() -> None:
    trainer = Trainer()
    found = minimal(winner(), trainer)
    assert low_sites(found.policy) == set(SITES)
    assert [rule.sites for rule in found.policy.rules] == ["*"]
    assert len(trainer.proved) == found.record.num_trials == 1
    assert set(found.record.removed) == {SOFTMAX, NORM, "*:cross_entropy"}
    assert found.check is not None
    assert found.check.passed
    assert found.check.name == "won-minimal"
    assert (found.versus_winner, found.versus_best) == (TIE, SURE)
    assert found.record.memory_bytes == len(SITES)


@pytest.mark.parametrize("needed", [{"softmax"}, {"layer_norm"}, {"cross_entropy"}, {"softmax", "cross_entropy"}])
def test_what_is_needed_stays_with_what_showed_it_and_the_rest_goes(needed: set[str]) -> None:
    trainer = Trainer(needed=lambda each: each.op in needed)
    found = minimal(winner(), trainer)
    assert {each.op for each in set(SITES) - low_sites(found.policy)} == needed
    assert set(found.record.needed) == {f"*:{op}" for op in needed}
    assert not set(found.record.removed) & set(found.record.needed)
    for rule in found.policy.rules[:-1]:
        assert rule.why.endswith("; tried in bf16: 5 % lost")
    assert low_sites(trainer.timed[-1][0]) == low_sites(found.policy)


def test_every_policy_that_is_accepted_was_proven_as_it_is() -> None:
    trainer = Trainer(needed=lambda each: each.op == "softmax")
    found = minimal(winner(), trainer)
    passed = [low_sites(policy) for policy in trainer.proved if not any(s.op == "softmax" for s in low_sites(policy))]
    assert low_sites(found.policy) in passed


def test_nothing_is_tried_twice() -> None:
    trainer = Trainer(needed=lambda each: each.op in ("softmax", "layer_norm", "cross_entropy"))
    found = minimal(winner(), trainer)
    tried = [frozenset(low_sites(policy)) for policy in trainer.proved]
    assert len(tried) == len(set(tried))
    assert found.record.removed == ()
    assert found.check is None
    assert trainer.timed == []


def test_what_a_must_protects_is_never_tried() -> None:
    musts = tuple(mark(each, "bf16", "must", "overflows") for each in SITES if each.op == "softmax")
    trainer = Trainer()
    found = minimal(winner(), trainer, catalog=replace(CATALOG, layout=layout(extra=musts)))
    assert all(not any(each.op == "softmax" for each in low_sites(policy)) for policy in trainer.proved)
    assert {each.op for each in set(SITES) - low_sites(found.policy)} == {"softmax"}
    assert [rule.why for rule in found.policy.rules if rule.format == "fp32"] == ["overflows"]


def test_what_is_predicted_to_make_the_step_longer_is_not_tried_and_the_prediction_is_its_reason() -> None:
    model = FakeModel(saves={each: -0.02 if each.op == "softmax" else 0.01 for each in SITES})
    trainer = Trainer()
    found = minimal(winner(), trainer, model)
    assert all(not any(each.op == "softmax" for each in low_sites(policy)) for policy in trainer.proved)
    assert "bf16 here would cost" in found.record.needed[SOFTMAX]
    assert SOFTMAX not in found.record.removed
    assert NORM in found.record.removed
    (kept,) = [rule for rule in found.policy.rules if rule.format == "fp32"]
    assert kept.why == "saturates"  # its price is added when it is written


def test_an_island_that_the_search_made_goes_too() -> None:
    found = minimal(winner(**{"layer__head": FP32}), Trainer())
    assert set(HEAD) <= low_sites(found.policy)
    assert "head:*" in found.record.removed


def test_what_comes_out_slower_than_the_winner_or_no_faster_than_the_bar_is_not_written() -> None:
    for versus in (lambda _, bar: SURE if bar.name == "fp32" else SLOWER, lambda *_: TIE):
        found = minimal(winner(), Trainer(versus_of=versus))
        assert set(SITES) - low_sites(found.policy)
        assert found.record.removed == ()
        assert found.record.reason == "what was left without the others was slower: none was taken out"
        assert found.check is None


def test_without_time_what_was_proven_by_then_counts_and_the_record_says_so() -> None:
    nothing = minimal(winner(), Trainer(time=0))
    assert (nothing.record.removed, nothing.record.is_whole) == ((), False)
    some = minimal(winner(**{"layer__head": FP32}), Trainer(needed=lambda each: each.op == "softmax", time=2))
    assert some.record.removed
    assert not some.record.is_whole
    assert minimal(winner(), Trainer()).record.is_whole


def test_a_setting_goes_only_if_the_step_is_surely_as_fast_without() -> None:
    outcome = winner(float32_matmul="tf32")
    for ratio, left in ((TIE, "ieee"), (Interval(value=1.0, low=0.9, high=1.1), "tf32"), (SLOWER, "tf32")):
        trainer = Trainer(
            versus_of=lambda ours, bar, ratio=ratio: (  # type: ignore[misc]
                SURE if bar.name == "fp32" else ratio if ours.float32_matmul != bar.float32_matmul == "tf32" else TIE
            )
        )
        found = minimal(outcome, trainer)
        if ratio is SLOWER:
            assert "without it the step takes 11 % longer" in found.record.needed["float32_matmul"]
        assert found.policy.float32_matmul == left


@dataclass
class Scaled(Trainer):
    """Refuses the loss scales in `bad`; 1 stands for none."""

    bad: tuple[float, ...] = ()

    def prove(self, name: str, policy: Policy) -> VerificationRecord:
        scale = 1.0 if policy.loss_scale.kind == "none" else policy.loss_scale.initial
        check = super().prove(name, policy)
        return replace(check, passed=False, reason=f"lost at {scale:g}") if scale in self.bad else check


@pytest.mark.parametrize(
    ("bad", "needed"),
    [
        ((2.0**-10,), "with gradients 1024 times smaller: lost at 0.000976562"),
        ((2.0**10,), "with gradients 1024 times larger: lost at 1024"),
        ((1.0,), "lost at 1"),
        ((), ""),
    ],
)
def test_a_loss_scale_goes_only_if_there_is_room_without_it(bad: tuple[float, ...], needed: str) -> None:
    outcome = winner()
    outcome = replace(outcome, trial=replace(outcome.trial, choice=defaults(rows(), "fp16")))
    trainer = Scaled(bad=bad, needed=lambda each: each.op in ("softmax", "layer_norm", "cross_entropy"))
    found = minimal(outcome, trainer)
    assert found.record.needed.get("loss_scale", "") == needed
    assert ("loss_scale" in found.record.removed) == (not needed)
    assert found.policy.loss_scale.kind == ("dynamic" if needed else "none")
    kinds = [each.loss_scale.kind for each in trainer.proved]
    assert kinds[-1] == ("none" if bad in ((), (1.0,)) else "static")


def test_a_bf16_winner_has_no_loss_scale_to_drop() -> None:
    trainer = Trainer()
    assert "loss_scale" not in {*minimal(winner(), trainer).record.removed, *minimal(winner(), trainer).record.needed}
    assert {each.loss_scale.kind for each in trainer.proved} == {"none"}


def test_a_baseline_is_left_as_it_is() -> None:
    assert minimized(replace(winner(), verdict="tie"), CATALOG, Trainer().bench, Prices(model=None)) is None
    plain = replace(winner(), trial=replace(trial("autocast-bf16", 1.2, kind="baseline"), choice={}))
    assert minimized(plain, CATALOG, Trainer().bench, Prices(model=None)) is None


def test_each_rule_says_what_fp32_costs_there() -> None:
    choice = defaults(rows(), "bf16") | {"op:layer_norm": LOW}
    policy = CATALOG.policy("p", choice)
    saves = {
        each: 0.004 if each.op == "softmax" else -0.01 for each in SITES if each.op in ("softmax", "cross_entropy")
    }
    whys = {rule.sites: rule.why for rule in priced(policy, SITES, Prices(model=FakeModel(saves=saves))).rules}  # type: ignore[arg-type]
    assert whys[SOFTMAX] == "saturates; fp32 here costs 0.8 % of step time, predicted"  # two softmaxes
    assert whys["*:cross_entropy"] == "logs; bf16 here would cost 1 % of step time, predicted"
    assert priced(policy, SITES, Prices(model=None)) == policy
    elsewhere = replace(policy, memory_format="channels_last")
    assert priced(elsewhere, SITES, Prices(model=FakeModel(saves=saves))) == elsewhere  # type: ignore[arg-type]


def test_real_proofs_take_out_what_a_real_run_does_without() -> None:
    recording = record(mlp.workload(), device="cpu", seed=0)
    graph = recording.op_graph
    found = layout_of(
        static_marks(graph, ("bf16",), "cpu"), layers_of(graph), Space(low=("bf16",)), lowerable_sites(graph)
    )
    catalog = replace(CATALOG, layout=found)
    proof = Prover(protocol(horizon=20, workload=mlp.workload(learning_rate=0.3)), tuple(mlp.batches())[4:])
    bench = Bench(
        prove=lambda name, policy: proof.prove(name, policy, chaotic=False),
        versus=Trainer().versus,
        has_time=lambda: True,
        memory=proof.memory,
    )
    choice = {"low": "bf16", "float32_matmul": "ieee"}
    kept = {str(each) for each, target in targets_of(choice, found)[0].items() if target == "fp32"}
    result = minimized(
        replace(winner(), trial=replace(winner().trial, choice=choice)), catalog, bench, Prices(model=None)
    )
    assert kept
    assert result is not None
    assert result.check is not None
    assert (result.check.passed, result.record.removed != ()) == (True, True)
    assert result.record.memory_bytes is not None
    assert result.record.memory_bytes > 0
